"""Show the inbox over HTTP, and take labels and feedback."""
