"""Tokens of images on experts that are final: kept, and summed up."""
