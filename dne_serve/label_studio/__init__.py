"""Be the ML backend of a Label Studio project, for pictures of the inbox."""
