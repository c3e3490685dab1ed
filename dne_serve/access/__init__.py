"""Decide who may ask for what, and write down who did."""
