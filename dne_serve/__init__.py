"""The HTTP server. Knows the model store, and nothing of the trainer."""
