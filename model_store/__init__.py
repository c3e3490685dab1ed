"""What a model is and where it is kept. Knows neither the trainer nor the server."""

__version__ = "0.1.0"
