"""Collect doubtful pictures off the request path, serve inbox and jobs, and run a trainer."""
