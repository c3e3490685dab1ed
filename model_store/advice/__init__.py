"""Keep advice on versions, and say it in a few lines."""
