"""Compute in several processes and threads: start them, join them, choose how many."""
