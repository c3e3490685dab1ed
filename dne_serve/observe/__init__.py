"""Turn what the server does into metrics, statistics, recent answers, a live view and traces."""
