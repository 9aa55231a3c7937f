"""Strands Agents: `DjangoSessionRepository` keeps its sessions as items. It is no Django app."""

from typing import TYPE_CHECKING

from helix_store.contrib._lazy import lazily

if TYPE_CHECKING:
    from helix_store.contrib.strands.repository import DjangoSessionRepository

__all__ = ["DjangoSessionRepository"]

__getattr__ = lazily(
    __name__,
    "Strands Agents",
    "strands",
    DjangoSessionRepository="repository",
)
