"""Learning a task. Knows the store and what a model is; knows nothing of the server."""
