"""Stores of other projects as sources of an import, and their registry."""

from helix_store.transfer.sources.foreign import ForeignSource, Origin
from helix_store.transfer.sources.readers import SourceUnreadable
from helix_store.transfer.sources.registry import SOURCES, register_source
from helix_store.transfer.sources.sessions import Tally

__all__ = ["SOURCES", "ForeignSource", "Origin", "SourceUnreadable", "Tally", "register_source"]
