"""Read the rules and addresses that settings are written in."""
