"""Tell other programs what happens: post events to URLs, signed and retried, and never in the way
of an answer."""
