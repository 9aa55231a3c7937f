"""The root has what an agent's loop needs, lazily; every public name has one path, which the docs use."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import helix_store
from tests.cells import for_each
from tests.test_layout import ALL_NAMES

ROOT = Path(__file__).parent.parent

# What the loop of an agent does not need.
LONG_PATH_ONLY = {
    "helix_store.admin": ALL_NAMES["helix_store.admin", "helix_store.admin"],
    "helix_store.checkpointers.graph.types": "GraphContinuation GraphPage GraphSessionSummary",
    "helix_store.cleanup": "CleanupDetails ErasureReceipt expired_session_cleanup_batches",
    "helix_store.core.contracts": "ChunkReader ChunkWriter HeldLock StreamManager require_state_store",
    "helix_store.core.dicts": ALL_NAMES["helix_store.core.dicts", "helix_store.core.dicts"],
    "helix_store.core.types": "CheckpointHead InterruptKind SubmissionOutcome",
    "helix_store.core.usage": "CallStats TokenCounts ToolStats UsageSource",
    "helix_store.doctor": "diagnose",
    "helix_store.models.fields": ALL_NAMES["helix_store.models.fields", "helix_store.models.fields"],
    "helix_store.reports": "ItemConversation Said SessionDirectory list_streams usage_report",
    "helix_store.retention": "RetentionPolicy RetentionSummary apply_retention",
    "helix_store.testing.state_store": "MessageContract SessionContract",
    "helix_store.transfer": ALL_NAMES["helix_store.transfer", "helix_store.transfer"],
    **{path: names for (path, _), names in ALL_NAMES.items() if path.startswith("helix_store.contrib.")},
    "helix_store.adapters": "LockedSession SessionAdapter copy_rows session_id_for AppTable Branch"
    " register_table registered_tables Database Statement Conversation ConversationMessage ConversationPage"
    " ConversationStep Outline Part register_conversation",
    "helix_store.answering": "aanswer_url answer_url",
    "helix_store.core.ids": "checkpoint_id parse_checkpoint_id",
    "helix_store.core.payloads": "decode encode",
    "helix_store.core.transcript": "parts_of",
    "helix_store.core.typed_json": "dumps loads",
    "helix_store.items": "ItemLog StoredItem",
    "helix_store.models": ALL_NAMES["helix_store.models", "helix_store.models"],
    "helix_store.schema": "current_version",
    "helix_store.testing": ALL_NAMES["helix_store.testing", "helix_store.testing"],
    "helix_store.views": "stream_events",
    "helix_store.workspaces": "configured_workspace_providers",
}


@for_each(
    ("path", "name"),
    [
        (path, name)
        for (path, _), names in ALL_NAMES.items()
        for name in names.split()
        if name not in LONG_PATH_ONLY.get(path, "").split()
    ],
)
def test_a_public_name_is_the_object_of_its_long_path(path: str, name: str) -> None:
    assert name in helix_store.__all__
    assert getattr(helix_store, name) is getattr(import_module(path), name)


def test_no_class_of_the_exceptions_is_missing() -> None:
    long_path = import_module("helix_store.exceptions")
    classes = [name for name in long_path.__all__ if isinstance(getattr(long_path, name), type)]
    assert set(classes) <= set(helix_store.__all__)


@for_each("name", helix_store.__all__)
def test_a_listed_name_can_be_imported(name: str) -> None:
    assert getattr(helix_store, name) is not None
    assert name in dir(helix_store)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'DatabaseStatStore'"):
        _ = helix_store.DatabaseStatStore  # type: ignore[attr-defined]


def test_a_submodule_can_be_imported_by_name() -> None:
    from helix_store import schema

    assert schema.__name__ == "helix_store.schema"


def test_what_type_checkers_read_is_what_python_imports() -> None:
    tree = ast.parse((ROOT / "helix_store/__init__.py").read_text())
    typed = {
        alias.name: statement.module
        for block in tree.body
        if isinstance(block, ast.If)
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert typed == helix_store._HOMES
    assert set(helix_store.__all__) == {"__version__", *helix_store.exceptions.__all__, *typed}


@pytest.mark.thorough
def test_the_package_can_be_imported_before_django_is_set_up() -> None:
    _run("""
import sys
import helix_store
assert "django" not in sys.modules
from helix_store import Limits, SessionState, StaleStateError, StateStore, UsageEntry
dir(helix_store)
assert "django" not in sys.modules

# A settings module calls it.
assert helix_store.sqlite_options()["transaction_mode"] == "IMMEDIATE"
from django.conf import settings
assert not settings.configured
settings.configure(INSTALLED_APPS=["helix_store"], HELIX_STORE={"LIMITS": {"max_state_bytes": 1024}})
import django
django.setup()
from helix_store import DatabaseStateStore
assert DatabaseStateStore().limits == Limits(max_state_bytes=1024)
""")


def _run(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
