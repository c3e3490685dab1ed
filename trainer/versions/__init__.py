"""Make one version: learn, judge, draft, publish and promote it."""
