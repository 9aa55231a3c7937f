"""Google ADK: `DjangoSessionService` keeps its sessions, events and state as items. It has no tables."""

from typing import TYPE_CHECKING

from helix_store.contrib._frameworks import lazily

if TYPE_CHECKING:
    from helix_store.contrib.google_adk.service import DjangoSessionService

__all__ = ["DjangoSessionService"]

__getattr__ = lazily(
    __name__,
    "Google ADK",
    "google-adk",
    within="google.adk",
    DjangoSessionService="service",
)
