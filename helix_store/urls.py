"""``path("…", include("helix_store.urls"))``: live streams as server-sent events, and answer pages."""

from __future__ import annotations

from django.urls import path

from helix_store.answer_pages import answer_page
from helix_store.streams.views import stream_events

__all__ = ["app_name", "urlpatterns"]

app_name = "helix_store"

# Ids are opaque, so they may contain slashes.
urlpatterns = [
    path("streams/<path:stream_id>/", stream_events, name="stream"),
    path("answer/<str:token>/", answer_page, name="answer"),
]
