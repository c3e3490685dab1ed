"""Collect the facts of one version in one record, for the page that shows them."""
