"""One import: `helix_store` has every public name, lazily, as the object of its long import path."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import helix_store
from tests.test_layout import ALL_NAMES

ROOT = Path(__file__).parent.parent

# What a caller of the stores does not need: adapters, tables, contract suites, and functions for one module.
LONG_PATH_ONLY = {
    **{path: names for (path, _), names in ALL_NAMES.items() if path.startswith("helix_store.contrib.")},
    "helix_store.adapters": "LockedSession SessionAdapter copy_rows session_id_for AppTable Branch"
    " register_table registered_tables Database Statement",
    "helix_store.core.ids": "checkpoint_id parse_checkpoint_id",
    "helix_store.core.payloads": "decode encode",
    "helix_store.core.typed_json": "dumps loads",
    "helix_store.items": "Item",
    "helix_store.models": ALL_NAMES["helix_store.models", "helix_store.models"],
    "helix_store.schema": "current_version",
    "helix_store.testing": ALL_NAMES["helix_store.testing", "helix_store.testing"],
    "helix_store.views": "stream_events",
    "helix_store.workspaces": "configured_workspace_providers",
}


@pytest.mark.parametrize(
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


@pytest.mark.parametrize("module", ["core.types", "core.usage", "exceptions", "stores", "checkpointers"])
def test_no_class_of_a_public_module_is_missing(module: str) -> None:
    long_path = import_module(f"helix_store.{module}")
    classes = [name for name in long_path.__all__ if isinstance(getattr(long_path, name), type)]
    assert set(classes) - {"Unset"} <= set(helix_store.__all__)


@pytest.mark.parametrize("name", helix_store.__all__)
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
    assert set(helix_store.__all__) == {"__version__", *typed}


def test_the_package_can_be_imported_before_django_is_set_up() -> None:
    _run("""
import sys
import helix_store
assert "django" not in sys.modules
from helix_store import Limits, SessionState, StaleStateError, StateStore, UsageEntry
dir(helix_store)
assert "django" not in sys.modules

from django.conf import settings
settings.configure(INSTALLED_APPS=["helix_store"], HELIX_STORE={"LIMITS": {"max_state_bytes": 1024}})
import django
django.setup()
from helix_store import DatabaseStateStore
assert DatabaseStateStore().limits == Limits(max_state_bytes=1024)
""")


def test_strict_type_checks_know_the_names_and_no_other(tmp_path: Path) -> None:
    program = """
from typing import assert_type
from helix_store import DatabaseStateStore, Mispelt, SessionState, StateStore, expired_session_cleanup

store: StateStore = DatabaseStateStore()
assert_type(store.load_state("a"), SessionState | None)
assert_type(expired_session_cleanup().marked, int)
"""
    (error,) = _type_errors(program, tmp_path)
    assert 'Module "helix_store" has no attribute "Mispelt"' in error


def test_dicts_pass_strict_type_checks_and_mispelt_keys_do_not(tmp_path: Path) -> None:
    program = """
from datetime import UTC, datetime, timedelta
from typing import Any
from helix_store import (
    DatabaseStateStore, DatabaseUsageStore, MessageDict, StagedChangesDict, StepInfo, ToolCallDict,
    UsageEntryDict,
)

store = DatabaseStateStore()
state = store.create_session(agent_type="agent", expires_at=datetime.now(UTC))
inferred = [{"role": "user", "content": "Hello."}]
given: dict[str, Any] = {"role": "user"}
typed: MessageDict = {"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}
store.append_messages("a", [{"role": "user", "content": "Hello.", "key of a provider": 1}])
store.append_messages("a", inferred)
store.append_messages("a", [given, typed])
store.save_state_and_promote_staging("a", state, [typed], StepInfo("step", step_count=1))
call: ToolCallDict = {"tool_name": "ask", "deadline": timedelta(days=7), "on_expiry": {"result": None}}
store.add_pending_tool_calls("a", {"call-1": call, "call-2": {"tool_name": "ask", "note": 1}})
store.suspend("a", kind="suspended_client_tool", context={}, pending={"call-3": {"tool_name": "ask"}})
staged: StagedChangesDict = {
    "tool_call_id": "a", "patches": [{"op": "move", "from": "/a", "path": ["b", 0]}]
}
store.stage_changes("a", "step", staged)
store.stage_changes("a", "step", {"tool_call_id": "a", "merge_changes": {"order": 1}})
entry: UsageEntryDict = {
    "kind": "tool", "session_id": "a", "step_count": 1, "timestamp": datetime.now(UTC),
    "source": {"type": "agent", "name": "a"}, "tool_name": "ask", "success": True,
    "duration_ms": timedelta(seconds=1),
}
DatabaseUsageStore().record_entries([entry, {**entry, "id": "b"}])
with store.session("a").step() as step:
    step.say(typed, {"role": "user"})
    step.wait_for({"call-4": {"tool_name": "ask", "deadline": timedelta(days=7), "on_expiry": "reject"}})

wrong: MessageDict = {"rule": "user"}
"""
    missing, extra = _type_errors(program, tmp_path)
    assert 'Missing key "role"' in missing
    assert 'Extra key "rule"' in extra


def _type_errors(program: str, folder: Path) -> list[str]:
    file = folder / "program.py"
    file.write_text(program)
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return [line for line in checked.stdout.splitlines() if "error:" in line]


def _run(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
