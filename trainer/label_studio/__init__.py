"""Exchange pictures and labels with a Label Studio server."""
