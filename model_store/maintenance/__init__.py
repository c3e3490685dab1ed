"""Take away, copy, count and mend things in a store; edit its classes."""
