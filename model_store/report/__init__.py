"""Collect the facts of a version in one record, for the page that shows them, and advice on it."""
