"""Tell about one version: the page of its report, the facts on it, and a few pictures."""
