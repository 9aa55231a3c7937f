"""Durable agent sessions in your own Django database.

Every public name can be imported from here. Its module is imported when the name is first used, so that the
import of the package imports no model: it may stand in settings and in ``apps.py``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from helix_store.checkpointers import (
        Claim,
        GraphCheckpointStore,
        InMemorySnapshotCheckpointer,
        SnapshotCheckpointer,
    )
    from helix_store.checkpointers.graph.types import (
        GraphCheckpoint,
        GraphContinuation,
        GraphPage,
        GraphSession,
        GraphSessionSummary,
        StoredMessage,
    )
    from helix_store.checkpointers.snapshots.rules import CheckpointMeta
    from helix_store.cleanup import (
        CleanupReport,
        CleanupSummary,
        ErasureReceipt,
        erase,
        expired_session_cleanup,
        expired_session_cleanup_batches,
    )
    from helix_store.core.async_contracts import AsyncStateStore
    from helix_store.core.contracts import StateStore, UsageStore, require_state_store
    from helix_store.core.dicts import (
        DefaultResultDict,
        MessageDict,
        PatchDict,
        StagedChangesDict,
        TokenCountsDict,
        ToolCallDict,
        UsageEntryDict,
        UsageSourceDict,
    )
    from helix_store.core.ids import new_id
    from helix_store.core.limits import Limits
    from helix_store.core.locks import LockInfo
    from helix_store.core.manager_contracts import (
        ChunkReader,
        ChunkWriter,
        HeldLock,
        LockManager,
        StreamManager,
    )
    from helix_store.core.merging import merge_changes
    from helix_store.core.patches import apply_patches
    from helix_store.core.retention import RetentionPolicy
    from helix_store.core.streams import PrunedStreams, StoredChunk, StreamInfo
    from helix_store.core.types import (
        UNSET,
        Checkpoint,
        CheckpointHead,
        CheckpointPage,
        CheckpointSource,
        Duration,
        InterruptKind,
        InterruptRequest,
        Message,
        MessagePage,
        PendingToolCall,
        Run,
        RunStatus,
        SessionHead,
        SessionMode,
        SessionPage,
        SessionState,
        SessionStatus,
        StagedChanges,
        StatusChange,
        StatusConflict,
        StepCommit,
        StepInfo,
        StreamStatus,
        Submission,
        SubmissionOutcome,
        SubSessionRef,
        Timestamp,
        UsageKind,
    )
    from helix_store.core.usage import (
        CallStats,
        TokenCounts,
        ToolStats,
        UsageBucket,
        UsageEntry,
        UsageGroup,
        UsageGrouping,
        UsagePage,
        UsageReport,
        UsageReportGrouping,
        UsageRollup,
        UsageSource,
        UsageTimeBucket,
        UsageTotal,
    )
    from helix_store.exceptions import (
        CheckpointNotFound,
        ConflictError,
        FencedOutError,
        HelixStoreError,
        IdempotencyConflict,
        IntegrityFault,
        InvalidCursor,
        InvalidPayload,
        InvalidQuery,
        LimitExceeded,
        LockLostError,
        NotFoundError,
        NotSupportedOnBackend,
        OutcomeUnknown,
        PatchError,
        RunNotFound,
        SessionBusy,
        SessionExists,
        SessionNotFound,
        StaleStateError,
        StoreBusy,
        StoreFull,
        StoreTimeout,
        StoreUnavailable,
        StreamClosed,
        StreamNotFound,
        StreamTruncated,
        TenantMoved,
        TurnInterrupted,
    )
    from helix_store.handles import SessionHandle, Step, Turn
    from helix_store.items import ItemLog
    from helix_store.retention import RetentionReport, apply_retention, prune_streams
    from helix_store.signals import session_answered, session_expired, session_failed, session_finished
    from helix_store.stores import (
        DatabaseLockManager,
        DatabaseStateStore,
        DatabaseStreamManager,
        DatabaseUsageStore,
        InMemoryLockManager,
        InMemoryStateStore,
        InMemoryStreamManager,
        InMemoryUsageStore,
        Lock,
        MemoryWorld,
        NoOpLockManager,
    )
    from helix_store.streams.reader import ResumableReader
    from helix_store.streams.writer import StreamWriter
    from helix_store.workspaces import StorageWorkspaceProvider, WorkspaceProvider

__all__ = [
    "UNSET",
    "AsyncStateStore",
    "CallStats",
    "Checkpoint",
    "CheckpointHead",
    "CheckpointMeta",
    "CheckpointNotFound",
    "CheckpointPage",
    "CheckpointSource",
    "ChunkReader",
    "ChunkWriter",
    "Claim",
    "CleanupReport",
    "CleanupSummary",
    "ConflictError",
    "DatabaseLockManager",
    "DatabaseStateStore",
    "DatabaseStreamManager",
    "DatabaseUsageStore",
    "DefaultResultDict",
    "Duration",
    "ErasureReceipt",
    "FencedOutError",
    "GraphCheckpoint",
    "GraphCheckpointStore",
    "GraphContinuation",
    "GraphPage",
    "GraphSession",
    "GraphSessionSummary",
    "HeldLock",
    "HelixStoreError",
    "IdempotencyConflict",
    "InMemoryLockManager",
    "InMemorySnapshotCheckpointer",
    "InMemoryStateStore",
    "InMemoryStreamManager",
    "InMemoryUsageStore",
    "IntegrityFault",
    "InterruptKind",
    "InterruptRequest",
    "InvalidCursor",
    "InvalidPayload",
    "InvalidQuery",
    "ItemLog",
    "LimitExceeded",
    "Limits",
    "Lock",
    "LockInfo",
    "LockLostError",
    "LockManager",
    "MemoryWorld",
    "Message",
    "MessageDict",
    "MessagePage",
    "NoOpLockManager",
    "NotFoundError",
    "NotSupportedOnBackend",
    "OutcomeUnknown",
    "PatchDict",
    "PatchError",
    "PendingToolCall",
    "PrunedStreams",
    "ResumableReader",
    "RetentionPolicy",
    "RetentionReport",
    "Run",
    "RunNotFound",
    "RunStatus",
    "SessionBusy",
    "SessionExists",
    "SessionHandle",
    "SessionHead",
    "SessionMode",
    "SessionNotFound",
    "SessionPage",
    "SessionState",
    "SessionStatus",
    "SnapshotCheckpointer",
    "StagedChanges",
    "StagedChangesDict",
    "StaleStateError",
    "StateStore",
    "StatusChange",
    "StatusConflict",
    "Step",
    "StepCommit",
    "StepInfo",
    "StorageWorkspaceProvider",
    "StoreBusy",
    "StoreFull",
    "StoreTimeout",
    "StoreUnavailable",
    "StoredChunk",
    "StoredMessage",
    "StreamClosed",
    "StreamInfo",
    "StreamManager",
    "StreamNotFound",
    "StreamStatus",
    "StreamTruncated",
    "StreamWriter",
    "SubSessionRef",
    "Submission",
    "SubmissionOutcome",
    "TenantMoved",
    "Timestamp",
    "TokenCounts",
    "TokenCountsDict",
    "ToolCallDict",
    "ToolStats",
    "Turn",
    "TurnInterrupted",
    "UsageBucket",
    "UsageEntry",
    "UsageEntryDict",
    "UsageGroup",
    "UsageGrouping",
    "UsageKind",
    "UsagePage",
    "UsageReport",
    "UsageReportGrouping",
    "UsageRollup",
    "UsageSource",
    "UsageSourceDict",
    "UsageStore",
    "UsageTimeBucket",
    "UsageTotal",
    "WorkspaceProvider",
    "__version__",
    "apply_patches",
    "apply_retention",
    "erase",
    "expired_session_cleanup",
    "expired_session_cleanup_batches",
    "merge_changes",
    "new_id",
    "prune_streams",
    "require_state_store",
    "session_answered",
    "session_expired",
    "session_failed",
    "session_finished",
]

__version__ = "0.1.0"

_NAMES_BY_HOME: Final = {
    "helix_store.stores": """
        DatabaseLockManager DatabaseStateStore DatabaseStreamManager DatabaseUsageStore InMemoryLockManager
        InMemoryStateStore InMemoryStreamManager InMemoryUsageStore Lock MemoryWorld NoOpLockManager""",
    "helix_store.checkpointers": """
        Claim GraphCheckpointStore InMemorySnapshotCheckpointer SnapshotCheckpointer""",
    "helix_store.checkpointers.graph.types": """
        GraphCheckpoint GraphContinuation GraphPage GraphSession GraphSessionSummary StoredMessage""",
    "helix_store.checkpointers.snapshots.rules": "CheckpointMeta",
    "helix_store.cleanup": """
        CleanupReport CleanupSummary ErasureReceipt erase expired_session_cleanup
        expired_session_cleanup_batches""",
    "helix_store.retention": "RetentionReport apply_retention prune_streams",
    "helix_store.workspaces": "StorageWorkspaceProvider WorkspaceProvider",
    "helix_store.core.async_contracts": "AsyncStateStore",
    "helix_store.core.contracts": "StateStore UsageStore require_state_store",
    "helix_store.core.dicts": """
        DefaultResultDict MessageDict PatchDict StagedChangesDict TokenCountsDict ToolCallDict UsageEntryDict
        UsageSourceDict""",
    "helix_store.core.ids": "new_id",
    "helix_store.core.limits": "Limits",
    "helix_store.core.locks": "LockInfo",
    "helix_store.core.manager_contracts": "ChunkReader ChunkWriter HeldLock LockManager StreamManager",
    "helix_store.core.merging": "merge_changes",
    "helix_store.core.patches": "apply_patches",
    "helix_store.core.retention": "RetentionPolicy",
    "helix_store.core.streams": "PrunedStreams StoredChunk StreamInfo",
    "helix_store.core.types": """
        UNSET Checkpoint CheckpointHead CheckpointPage CheckpointSource Duration InterruptKind
        InterruptRequest Message MessagePage PendingToolCall Run RunStatus SessionHead SessionMode SessionPage
        SessionState SessionStatus StagedChanges StatusChange StatusConflict StepCommit StepInfo StreamStatus
        SubSessionRef Submission SubmissionOutcome Timestamp UsageKind""",
    "helix_store.core.usage": """
        CallStats TokenCounts ToolStats UsageBucket UsageEntry UsageGroup UsageGrouping UsagePage UsageReport
        UsageReportGrouping UsageRollup UsageSource UsageTimeBucket UsageTotal""",
    "helix_store.exceptions": """
        CheckpointNotFound ConflictError FencedOutError HelixStoreError IdempotencyConflict IntegrityFault
        InvalidCursor InvalidPayload InvalidQuery LimitExceeded LockLostError NotFoundError
        NotSupportedOnBackend OutcomeUnknown PatchError RunNotFound SessionBusy SessionExists SessionNotFound
        StaleStateError StoreBusy StoreFull StoreTimeout StoreUnavailable StreamClosed StreamNotFound
        StreamTruncated TenantMoved TurnInterrupted""",
    "helix_store.handles": "SessionHandle Step Turn",
    "helix_store.items": "ItemLog",
    "helix_store.signals": "session_answered session_expired session_failed session_finished",
    "helix_store.streams.reader": "ResumableReader",
    "helix_store.streams.writer": "StreamWriter",
}
_HOMES: Final = {name: home for home, names in _NAMES_BY_HOME.items() for name in names.split()}


if not TYPE_CHECKING:  # A type checker that sees it takes every misspelt name for a public one.

    def __getattr__(name: str) -> Any:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(home), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
