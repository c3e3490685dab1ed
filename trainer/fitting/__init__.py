"""Fit a linear classifier to tokens that are final, and choose how by images that are left out."""
