"""Trace requests and swaps for OpenTelemetry, off the way of the answers. Off by default."""
