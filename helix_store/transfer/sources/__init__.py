"""Stores of other projects as sources of an import, and the registry of them."""

from helix_store.transfer.sources.origin import ForeignSource, Origin, Tally
from helix_store.transfer.sources.postgres import SourceUnreadable
from helix_store.transfer.sources.registry import SOURCES

__all__ = ["SOURCES", "ForeignSource", "Origin", "SourceUnreadable", "Tally"]
