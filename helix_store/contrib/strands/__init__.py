"""Strands Agents: `DjangoSessionRepository` keeps its sessions as items.

It has no tables. As a Django app, it shows the conversations of these sessions in the admin.
"""

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
