"""Run a command on a cluster, and follow it from here."""
