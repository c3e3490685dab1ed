"""Learn tasks and measure versions. Know the store and the network, and nothing of the server."""
