"""Carry a request from image bytes to an answer."""
