"""Streams: live output that readers can resume."""
