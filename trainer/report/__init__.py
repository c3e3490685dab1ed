"""Tell people about a version: in the terminal, and as a page with plots."""
