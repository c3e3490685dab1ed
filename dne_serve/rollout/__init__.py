"""Follow a channel, swap versions in memory, and watch a new version."""
