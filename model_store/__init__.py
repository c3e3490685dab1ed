"""Define a model and keep its versions. Knows neither the trainer nor the server."""

__version__ = "0.1.0"
