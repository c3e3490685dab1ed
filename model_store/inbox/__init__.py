"""Keep pictures that are worth a look, the answers to them, and their labels."""
