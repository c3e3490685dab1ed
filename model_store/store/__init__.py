"""Publish, read and verify versions, and move channels between them."""
