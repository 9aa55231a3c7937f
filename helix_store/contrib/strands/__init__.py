"""Strands Agents: `DjangoStorage` keeps the snapshots of its sessions as items, and `DjangoSessionRepository`
their messages.

It has no tables. As a Django app, it shows the conversations of these sessions in the admin.
"""

from typing import TYPE_CHECKING

from helix_store.contrib._frameworks import lazily

if TYPE_CHECKING:
    from helix_store.contrib.strands.repository import DjangoSessionRepository, DjangoStorage

__all__ = ["DjangoSessionRepository", "DjangoStorage"]

__getattr__ = lazily(
    __name__,
    "Strands Agents",
    "strands",
    DjangoSessionRepository="repository",
    DjangoStorage="repository",
)
