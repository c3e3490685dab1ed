"""Follow a channel, swap versions in memory, watch how a new one does."""
