"""Define the methods, one module each."""
