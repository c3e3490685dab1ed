"""Keep doubtful pictures in the inbox, off the way of the answers."""
