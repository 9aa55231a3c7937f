"""Durable agent sessions in your own Django database.

Import the names that an agent's loop needs from here, and other public names from their packages. Each module
is imported when one of its names is first used. Importing the package itself therefore imports no models, and
is safe in settings and in ``apps.py``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from helix_store import exceptions
from helix_store.exceptions import *  # noqa: F403  all of its public names

if TYPE_CHECKING:
    from helix_store.checkpointers import Claim as Claim
    from helix_store.checkpointers import GraphCheckpointStore as GraphCheckpointStore
    from helix_store.checkpointers import InMemorySnapshotCheckpointer as InMemorySnapshotCheckpointer
    from helix_store.checkpointers import SnapshotCheckpointer as SnapshotCheckpointer
    from helix_store.checkpointers.graph.types import GraphCheckpoint as GraphCheckpoint
    from helix_store.checkpointers.graph.types import GraphSession as GraphSession
    from helix_store.checkpointers.graph.types import StoredMessage as StoredMessage
    from helix_store.checkpointers.snapshots import CheckpointMeta as CheckpointMeta
    from helix_store.cleanup import CleanupSummary as CleanupSummary
    from helix_store.cleanup import erase as erase
    from helix_store.cleanup import expired_session_cleanup as expired_session_cleanup
    from helix_store.conf import sqlite_options as sqlite_options
    from helix_store.core.approvals import ApprovedCall as ApprovedCall
    from helix_store.core.approvals import call_digest as call_digest
    from helix_store.core.contracts import LockManager as LockManager
    from helix_store.core.contracts import StateStore as StateStore
    from helix_store.core.contracts import UsageStore as UsageStore
    from helix_store.core.dicts import MessageDict as MessageDict
    from helix_store.core.dicts import StagedChangesDict as StagedChangesDict
    from helix_store.core.dicts import ToolCallDict as ToolCallDict
    from helix_store.core.dicts import UsageEntryDict as UsageEntryDict
    from helix_store.core.effects import Effect as Effect
    from helix_store.core.effects import EffectPage as EffectPage
    from helix_store.core.ids import new_id as new_id
    from helix_store.core.limits import Limits as Limits
    from helix_store.core.patches import apply_patches as apply_patches
    from helix_store.core.patches import merge_changes as merge_changes
    from helix_store.core.posts import DuePost as DuePost
    from helix_store.core.posts import Post as Post
    from helix_store.core.posts import PostPage as PostPage
    from helix_store.core.streams import StoredChunk as StoredChunk
    from helix_store.core.streams import StreamInfo as StreamInfo
    from helix_store.core.types import UNSET as UNSET
    from helix_store.core.types import Checkpoint as Checkpoint
    from helix_store.core.types import CheckpointPage as CheckpointPage
    from helix_store.core.types import CheckpointSource as CheckpointSource
    from helix_store.core.types import InterruptRequest as InterruptRequest
    from helix_store.core.types import LockInfo as LockInfo
    from helix_store.core.types import Message as Message
    from helix_store.core.types import MessagePage as MessagePage
    from helix_store.core.types import PendingToolCall as PendingToolCall
    from helix_store.core.types import Run as Run
    from helix_store.core.types import RunStatus as RunStatus
    from helix_store.core.types import SessionHead as SessionHead
    from helix_store.core.types import SessionMode as SessionMode
    from helix_store.core.types import SessionPage as SessionPage
    from helix_store.core.types import SessionState as SessionState
    from helix_store.core.types import SessionStatus as SessionStatus
    from helix_store.core.types import StagedChanges as StagedChanges
    from helix_store.core.types import StatusChange as StatusChange
    from helix_store.core.types import StatusConflict as StatusConflict
    from helix_store.core.types import StepCommit as StepCommit
    from helix_store.core.types import StepInfo as StepInfo
    from helix_store.core.types import StreamStatus as StreamStatus
    from helix_store.core.types import Submission as Submission
    from helix_store.core.types import SubSessionRef as SubSessionRef
    from helix_store.core.types import UsageKind as UsageKind
    from helix_store.core.usage import Budget as Budget
    from helix_store.core.usage import BudgetStatus as BudgetStatus
    from helix_store.core.usage import TokenCounts as TokenCounts
    from helix_store.core.usage import UsageBucket as UsageBucket
    from helix_store.core.usage import UsageEntry as UsageEntry
    from helix_store.core.usage import UsagePage as UsagePage
    from helix_store.core.usage import UsageRollup as UsageRollup
    from helix_store.core.usage import UsageSource as UsageSource
    from helix_store.retention import prune_streams as prune_streams
    from helix_store.sessions.messages import aannounce_due_posts as aannounce_due_posts
    from helix_store.sessions.messages import announce_due_posts as announce_due_posts
    from helix_store.signals import effect_unknown as effect_unknown
    from helix_store.signals import session_answered as session_answered
    from helix_store.signals import session_expired as session_expired
    from helix_store.signals import session_failed as session_failed
    from helix_store.signals import session_finished as session_finished
    from helix_store.signals import session_posted as session_posted
    from helix_store.signals import session_ready as session_ready
    from helix_store.signals import session_waiting as session_waiting
    from helix_store.stores import DatabaseBudgetStore as DatabaseBudgetStore
    from helix_store.stores import DatabaseLockManager as DatabaseLockManager
    from helix_store.stores import DatabaseStateStore as DatabaseStateStore
    from helix_store.stores import DatabaseStreamManager as DatabaseStreamManager
    from helix_store.stores import DatabaseUsageStore as DatabaseUsageStore
    from helix_store.stores import InMemoryBudgetStore as InMemoryBudgetStore
    from helix_store.stores import InMemoryLockManager as InMemoryLockManager
    from helix_store.stores import InMemoryStateStore as InMemoryStateStore
    from helix_store.stores import InMemoryStore as InMemoryStore
    from helix_store.stores import InMemoryStreamManager as InMemoryStreamManager
    from helix_store.stores import InMemoryUsageStore as InMemoryUsageStore
    from helix_store.stores import Lock as Lock
    from helix_store.stores import MemoryWorld as MemoryWorld
    from helix_store.stores import NoOpLockManager as NoOpLockManager
    from helix_store.stores import OpenEffect as OpenEffect
    from helix_store.stores import SessionHandle as SessionHandle
    from helix_store.stores import Step as Step
    from helix_store.stores import Store as Store
    from helix_store.stores import Turn as Turn
    from helix_store.stores.conditions import StuckSession as StuckSession
    from helix_store.stores.conditions import aannounce_ready as aannounce_ready
    from helix_store.stores.conditions import afind_stuck as afind_stuck
    from helix_store.stores.conditions import announce_ready as announce_ready
    from helix_store.stores.conditions import find_stuck as find_stuck
    from helix_store.streams.manager import StreamWriter as StreamWriter
    from helix_store.workspaces import StorageWorkspaceProvider as StorageWorkspaceProvider
    from helix_store.workspaces import WorkspaceProvider as WorkspaceProvider

__version__ = "0.1.0"

_NAMES_BY_HOME: Final = {
    "helix_store.stores": """
        DatabaseBudgetStore DatabaseLockManager DatabaseStateStore DatabaseStreamManager DatabaseUsageStore
        InMemoryBudgetStore InMemoryLockManager InMemoryStateStore InMemoryStore InMemoryStreamManager
        InMemoryUsageStore Lock MemoryWorld NoOpLockManager OpenEffect SessionHandle Step Store Turn""",
    "helix_store.checkpointers": """
        Claim GraphCheckpointStore InMemorySnapshotCheckpointer SnapshotCheckpointer""",
    "helix_store.checkpointers.graph.types": "GraphCheckpoint GraphSession StoredMessage",
    "helix_store.checkpointers.snapshots": "CheckpointMeta",
    "helix_store.cleanup": "CleanupSummary erase expired_session_cleanup",
    "helix_store.retention": "prune_streams",
    "helix_store.workspaces": "StorageWorkspaceProvider WorkspaceProvider",
    "helix_store.conf": "sqlite_options",
    "helix_store.core.approvals": "ApprovedCall call_digest",
    "helix_store.core.contracts": "LockManager StateStore UsageStore",
    "helix_store.core.dicts": "MessageDict StagedChangesDict ToolCallDict UsageEntryDict",
    "helix_store.core.effects": "Effect EffectPage",
    "helix_store.core.ids": "new_id",
    "helix_store.core.limits": "Limits",
    "helix_store.core.patches": "apply_patches merge_changes",
    "helix_store.core.streams": "StoredChunk StreamInfo",
    "helix_store.core.posts": "DuePost Post PostPage",
    "helix_store.core.types": """
        UNSET Checkpoint CheckpointPage CheckpointSource InterruptRequest LockInfo Message MessagePage
        PendingToolCall Run RunStatus SessionHead SessionMode SessionPage SessionState SessionStatus
        StagedChanges StatusChange StatusConflict StepCommit StepInfo StreamStatus SubSessionRef Submission
        UsageKind""",
    "helix_store.core.usage": """
        Budget BudgetStatus TokenCounts UsageBucket UsageEntry UsagePage UsageRollup UsageSource""",
    "helix_store.sessions.messages": "aannounce_due_posts announce_due_posts",
    "helix_store.signals": """
        effect_unknown session_answered session_expired session_failed session_finished session_posted
        session_ready session_waiting""",
    "helix_store.stores.conditions": """
        StuckSession aannounce_ready afind_stuck announce_ready find_stuck""",
    "helix_store.streams.manager": "StreamWriter",
}
_HOMES: Final = {name: home for home, names in _NAMES_BY_HOME.items() for name in names.split()}

__all__ = sorted({*_HOMES, *exceptions.__all__, "__version__"})


if not TYPE_CHECKING:  # If a type checker sees this function, it accepts every misspelt name as a public one.

    def __getattr__(name: str) -> Any:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(home), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
