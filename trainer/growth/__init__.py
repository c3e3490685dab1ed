"""Grow a network as far as the data needs: low-rank changes, and statistics after them."""
