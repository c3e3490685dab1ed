"""Run the command `dne-store`, and share options and exit codes with the other two."""
