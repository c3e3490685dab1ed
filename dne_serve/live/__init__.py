"""Show what the server does now, as JSON and as a stream of events."""
