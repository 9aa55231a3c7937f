"""The views that ``helix_store.urls`` includes; the public path of `helix_store.streams.views`."""

from helix_store.streams.views import stream_events

__all__ = ["stream_events"]
