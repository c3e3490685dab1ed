"""Grow a network as far as the data needs: low-rank changes, adapting, and choosing when."""
