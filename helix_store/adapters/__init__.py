"""What an adapter is built with: a class that keeps the sessions of another framework in this store.

Public, also for adapters of other packages.
"""

from helix_store.adapters.ids import session_id_for
from helix_store.adapters.session import LockedSession, SessionAdapter

__all__ = ["LockedSession", "SessionAdapter", "session_id_for"]
