"""The views that ``helix_store.urls`` includes; a door to `helix_store.streams.views`."""

from helix_store.streams.views import stream_events

__all__ = ["stream_events"]
