"""Public names stay at their import paths, SQL behind ``engine.Database``, and docstrings are UTF-8."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

from tests.cells import for_each

PACKAGE = Path(__file__).parent.parent / "helix_store"

PUBLIC_NAMES = {
    "helix_store.admin": "SessionChildAdmin database_sites",
    "helix_store.adapters": "LockedSession SessionAdapter copy_rows session_id_for",
    "helix_store.answering": "aanswer_url answer_url",
    "helix_store.checkpointers": """
        Claim GraphCheckpointStore InMemorySnapshotCheckpointer SnapshotCheckpointer""",
    "helix_store.checkpointers.graph.types": "GraphContinuation GraphPage GraphSessionSummary",
    "helix_store.cleanup": """
        CleanupDetails CleanupSummary ErasureReceipt erase expired_session_cleanup
        expired_session_cleanup_batches""",
    "helix_store.contrib.agent_framework": (
        "DjangoAgentSessions DjangoCheckpointStorage DjangoHistoryProvider DjangoSessionStore"
    ),
    "helix_store.contrib.chat": "Chat ChatTurn Client Out",
    "helix_store.contrib.claude_agent": "DjangoClaudeSessions DjangoSessionStore",
    "helix_store.contrib.google_adk": "DjangoSessionService",
    "helix_store.contrib.langgraph": "DjangoSaver DjangoStore UsageRecorder chat_answer register_types",
    "helix_store.contrib.metrics": (
        "Figures HealthView HelixCollector MetricsView bearer_token read_figures"
    ),
    "helix_store.contrib.openai_agents": "DjangoSession RunStateClaim RunStateStore StoredRunState",
    "helix_store.contrib.opentelemetry": "TracedEffect TracedStep TracedTurn traced traced_answer",
    "helix_store.contrib.pydantic_ai": "DjangoConversationStore",
    "helix_store.contrib.row_level_security": "EnableRowLevelSecurity",
    "helix_store.contrib.session_search": "IndexSessionSearch",
    "helix_store.contrib.strands": "DjangoSessionRepository DjangoStorage",
    "helix_store.core.approvals": "ApprovedCall call_digest",
    "helix_store.core.contracts": (
        "ChunkReader ChunkWriter HeldLock LockManager StateStore StreamManager require_state_store"
    ),
    "helix_store.core.dicts": "MessageDict StagedChangesDict ToolCallDict UsageEntryDict",
    "helix_store.core.ids": "checkpoint_id new_id parse_checkpoint_id",
    "helix_store.core.limits": "Limits",
    "helix_store.core.patches": "apply_patches merge_changes",
    "helix_store.core.payloads": "decode encode",
    "helix_store.core.transcript": "parts_of",
    "helix_store.core.typed_json": "dumps loads",
    "helix_store.core.posts": "DuePost Post PostPage",
    "helix_store.core.types": """
        Checkpoint CheckpointHead CheckpointPage CheckpointSource InterruptKind InterruptRequest
        MessagePage PendingToolCall Run RunStatus SessionHead SessionMode SessionPage
        SessionState SessionStatus StagedChanges StatusChange StatusConflict StepCommit StepInfo StreamStatus
        SubSessionRef Submission SubmissionOutcome UsageKind""",
    "helix_store.core.usage": """
        Budget BudgetStatus CallStats TokenCounts ToolStats UsageEntry UsagePage UsageRollup UsageSource""",
    "helix_store.core.streams": "StoredChunk StreamInfo",
    "helix_store.doctor": "diagnose",
    "helix_store.exceptions": """
        ApprovalUsed BudgetExceeded CheckpointNotFound ConflictError FencedOutError HelixStoreError
        IdempotencyConflict IntegrityFault InvalidCursor InvalidPayload InvalidQuery LimitExceeded
        LockLostError NotFoundError
        NotSupportedOnBackend OutcomeUnknown OutsideTransaction PatchError RunNotFound SessionBusy
        NotApproved NotPermitted SessionEnded SessionErased SessionExists SessionNotFound
        StaleStateError StoreBusy StoreFull StoreTimeout
        StoreUnavailable StreamClosed StreamNotFound StreamTruncated TenantMoved TurnInterrupted
        UnsupportedIsolation""",
    "helix_store.items": "ItemLog StoredItem",
    "helix_store.models": """
        Budget BudgetCounter Checkpoint InterruptRequest Item Lock Message Operation Post Run Session
        StagedChange Stream StreamChunk SubSessionRef Tombstone UsageEntry""",
    "helix_store.models.fields": "IdentifierField MomentField PayloadField",
    "helix_store.reports": "ItemConversation Said",
    "helix_store.schema": "current_version",
    "helix_store.stores": """
        DatabaseStateStore InMemoryStateStore InMemoryStore OpenEffect SessionHandle Step Store Turn""",
    "helix_store.stores.conditions": """
        StuckSession aannounce_ready afind_stuck announce_ready find_stuck""",
    "helix_store.testing": """
        BudgetContract EffectContract LockManagerContract PostContract StateStoreContract
        StreamManagerContract UsageStoreContract""",
    "helix_store.testing.state_store": "MessageContract SessionContract",
    "helix_store.transfer": "DatabaseSource ExportFile import_units write_export",
}

# The path, and the room that the names are defined in.
RE_EXPORTED_NAMES = {
    ("helix_store.handles", "helix_store.stores"): "OpenEffect SessionHandle Step Turn",
    ("helix_store.adapters", "helix_store.catalogue"): """
        AppTable Branch Conversation ConversationPage ConversationStep Outline register_conversation
        register_table registered_tables""",
    ("helix_store.adapters", "helix_store.core"): "ConversationMessage Part",
    ("helix_store.adapters", "helix_store.engine"): "Database Statement",
    ("helix_store.core.contracts", "helix_store.core"): "UsageStore",
    ("helix_store.core.merging", "helix_store.core"): "merge_changes",
    ("helix_store.reports", "helix_store.stores"): "SessionDirectory",
    ("helix_store.reports", "helix_store.streams"): "list_streams",
    ("helix_store.reports", "helix_store.usage"): "usage_report",
    ("helix_store.retention", "helix_store.streams"): "prune_streams",
    ("helix_store.retention", "helix_store.cleanup"): "RetentionSummary apply_retention",
    ("helix_store.retention", "helix_store.core"): "RetentionPolicy",
    ("helix_store.sessions.messages", "helix_store.sessions"): "aannounce_due_posts announce_due_posts",
    ("helix_store.stores", "helix_store.budgets"): "DatabaseBudgetStore InMemoryBudgetStore",
    ("helix_store.stores", "helix_store.core"): """
        LockInfo StoredChunk StreamInfo TokenCounts UsageBucket UsageEntry UsagePage UsageRollup
        UsageSource""",
    ("helix_store.stores", "helix_store.engine"): "MemoryWorld",
    ("helix_store.stores", "helix_store.locks"): (
        "DatabaseLockManager InMemoryLockManager Lock NoOpLockManager"
    ),
    ("helix_store.stores", "helix_store.streams"): "DatabaseStreamManager InMemoryStreamManager StreamWriter",
    ("helix_store.stores", "helix_store.usage"): "DatabaseUsageStore InMemoryUsageStore",
    ("helix_store.views", "helix_store.streams"): "stream_events",
    ("helix_store.workspaces", "helix_store.cleanup"): (
        "StorageWorkspaceProvider WorkspaceProvider configured_workspace_providers"
    ),
}
ALL_NAMES = {(path, path): names for path, names in PUBLIC_NAMES.items()} | RE_EXPORTED_NAMES

NOT_IN_DEV = {
    "helix_store.contrib.agent_framework": "agent_framework",
    "helix_store.contrib.google_adk": "google.adk",
}
"""The frameworks that the extra ``dev`` does not install."""

BESIDE_THE_DOOR = {
    **dict.fromkeys(
        ("checks/databases.py", "checks/settings.py", "checks/databases.py"),
        "system checks ask databases that the stores may not use",
    ),
    "contrib/langgraph/vectors/migrations/0001_vectors.py": "a migration has a schema editor",
    "contrib/langgraph/vectors/models.py": "Django asks a field for its type by the connection",
    "contrib/row_level_security.py": "a migration has a schema editor",
    "contrib/session_search.py": "a migration has a schema editor",
    "migrations/0014_leftovers_of_moves.py": "a migration has a schema editor",
    "migrations/_operations.py": "a migration has a schema editor",
    "migrations/_plans.py": "the lock for processes that migrate, before the schema is there",
    "models/fields.py": "Django asks a field for its type by the connection",
    "transfer/sources.py": "the database of another store, which is no alias of the project",
}


@for_each(
    ("path", "room", "name"),
    [(path, room, name) for (path, room), names in ALL_NAMES.items() for name in names.split()],
)
def test_a_public_path_has_the_object_of_its_room(path: str, room: str, name: str) -> None:
    pytest.importorskip(NOT_IN_DEV.get(path, "django"))
    found = getattr(import_module(path), name)
    home = import_module(found.__module__)
    assert f"{home.__name__}.".startswith(f"{room}.")
    assert getattr(home, name) is found
    assert name in import_module(path).__all__


def test_the_urls_can_be_included() -> None:
    urls = import_module("helix_store.urls")
    assert urls.app_name == "helix_store"
    assert urls.urlpatterns


def test_statements_reach_a_database_by_the_engine_only() -> None:
    asks_directly = re.compile(r"\.vendor\b|\.cursor\(|\.quote_name\b")
    files = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if asks_directly.search(path.read_text())
    }
    outside = {name for name in files if not name.startswith("engine/")}
    assert outside == BESIDE_THE_DOOR.keys()


@pytest.mark.thorough
@for_each("folder", ["helix_store", "example_project", "tests", "benchmarks"])
def test_a_docstring_has_no_character_that_an_escape_made(folder: str) -> None:
    """Python 3.13 compiles no docstring with a surrogate, which ``\\udc00`` makes of one that is not raw."""
    made = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        f"{path.relative_to(PACKAGE.parent)}:{getattr(node, 'lineno', 1)}"
        for path in sorted((PACKAGE.parent / folder).rglob("*.py"))
        if b"\\" in (source := path.read_bytes())
        for node in ast.walk(ast.parse(source))
        if isinstance(node, documented) and made.search(ast.get_docstring(node, clean=False) or "")
    ]
    assert found == []


def test_a_docstring_names_the_package_that_is_its_source() -> None:
    unnamed = re.compile(r"Source:(?:\s(?!Source:)[^\s.]+)*\sdocument\.")
    assert [path.name for path in PACKAGE.rglob("*.py") if unnamed.search(path.read_text())] == []


def test_no_package_uses_a_private_name_of_another_one() -> None:
    """A package is a folder or a file directly below ``helix_store``; `_x` of another one is a finding."""
    defined: dict[str, set[str]] = {}
    used: dict[Path, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
        defined.setdefault(_package_of(path), set()).update(_private_definitions(nodes))
        used[path] = _private_uses(nodes, _package_of(path))
    of_others = {
        package: set().union(*(defined[other] for other in defined if other != package)) - own - _OF_OTHERS
        for package, own in defined.items()
    }
    found = [
        f"{path.relative_to(PACKAGE)}: {name}"
        for path, names in used.items()
        for name in names
        if name in of_others[_package_of(path)]
    ]
    assert set(found) == {"stores/turn.py: _backend"}  # a call more would be one more file of each turn


_OF_OTHERS = {"_asdict", "_fields", "_make", "_replace", "_state", "_threads"}
"""Names of named tuples, of Django's models and of executors, which some of our own classes have too."""


def _package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _private_definitions(nodes: list[ast.AST]) -> set[str]:
    """Return the private names of functions, classes, variables and attributes that a file sets."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return set(filter(_is_private, names))


def _private_uses(nodes: list[ast.AST], package: str) -> list[str]:
    """Return the private names that a file imports from other packages, or reads from objects."""
    uses = []
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("helix_store."):
            is_other = (node.module or "").split(".")[1] != package
            uses += [each.name for each in node.names if is_other and _is_private(each.name)]
        elif isinstance(node, ast.Attribute) and _is_private(node.attr) and not _is_own(node.value):
            uses.append(node.attr)
    return uses


def _is_own(value: ast.expr) -> bool:
    """Return whether an attribute of this value is one of the class itself or of its bases."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "super":
        return True
    return isinstance(value, ast.Name) and value.id in ("self", "cls")
