"""Keep the loop from doubtful pictures to labels to jobs: its objects, and how they are read."""
