"""A migration never changes: a database that has it applied would differ from a new one, unnoticed."""

from __future__ import annotations

from hashlib import sha256
from typing import Any, Final

import pytest
from django.apps import apps
from django.db.migrations import AddIndex
from django.db.migrations.loader import MigrationLoader
from django.db.models import Q

DIGESTS: Final[dict[str, str]] = {
    "helix_store.0001_sessions": "0bee2f74cb5c9784",
    "helix_store.0002_remote_sub_sessions": "83f12958ebf680eb",
    "helix_store.0003_pending_client_tool_calls": "f84d5440e3ae111b",
    "helix_store.0004_root_session_and_call_ownership": "5499e1916c22a4cc",
    "helix_store.0005_completed_client_tool_calls": "466e164ead84c82b",
    "helix_store.0006_mode_and_completion_reason": "c3bb6e6c259fee66",
    "helix_store.0007_suspension_context": "0f1725a1f66adfe4",
    "helix_store.0008_additions": "e7e9d88c83629767",
    "helix_store.0009_posts": "41a19879d528068f",
    "helix_store.0010_approvals": "d60f7895f0dd0cc0",
    "helix_store.0011_budgets": "468fb735bd5dea00",
    "helix_store.0012_decisions": "ae4e2a8e8647be8e",
    "helix_store.0013_tombstones": "bcd6620ddeff73ef",
    "helix_store.0015_token_kinds": "0c4ab5c7eedeae48",
    "helix_store.0014_leftovers_of_moves": "484dc45e93367bc3",
    "helix_store.0016_effects": "47a8b74fb487458f",
    "helix_store.0017_stuck_sessions": "ebb724951c3f23a0",
    "helix_store.0018_answer_permission": "255be74434decff9",
    "helix_store.0019_builds": "cf7da63581cb52a9",
    "helix_store_claude_agent.0001_sessions": "db74547993d4d258",
    "helix_store_langgraph.0001_checkpoints": "c6564e5b74511455",
    "helix_store_langgraph.0002_memories": "424878c2eff1254c",
    "helix_store_langgraph.0003_newest_checkpoints": "c1c8970cb9e4a7e6",
    "helix_store_langgraph_vectors.0001_vectors": "03ff9288492fd946",
    "helix_store_openai_agents.0001_run_states": "5608ff97279238fb",
    "helix_store_pydantic_ai.0001_conversations": "8aa9b05223703097",
}
"""Add a line for a new migration. Never change or remove a line of a migration that is in a commit.

This is a rule without exceptions, also before a release: whoever has migrated a database with that commit
could not upgrade it any more. `test_unpublished_numbering` has a database to which this happened.
"""


def described(value: Any) -> Any:
    """What a value in a migration stands for, whatever code has made it."""
    if hasattr(value, "deconstruct"):
        arguments, keywords = value.deconstruct()[-2:]
        # Django 6.1 reports it, earlier versions do not; it changes nothing in a database.
        keywords.pop("elidable", None)
        return [type(value).__name__, described(arguments), described(keywords)]
    if isinstance(value, dict):
        return sorted((str(key), described(each)) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return [described(each) for each in value]
    return getattr(value, "__qualname__", None) or repr(value)


def digests() -> dict[str, str]:
    found = {}
    for (label, name), migration in MigrationLoader(None).disk_migrations.items():
        if apps.get_app_config(label).name.startswith("helix_store"):
            operations = repr(described(migration.operations))
            found[f"{label}.{name}"] = sha256(operations.encode()).hexdigest()[:16]
    return found


def test_no_migration_has_changed() -> None:
    # Settings may leave an app out.
    assert {**DIGESTS, **digests()} == DIGESTS


def test_a_change_of_what_migrations_share_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    session = MigrationLoader(None).disk_migrations["helix_store", "0001_sessions"]
    before = described(session.operations)
    index = next(each.index for each in session.operations if isinstance(each, AddIndex))
    monkeypatch.setattr(index, "condition", Q(tenant=""))
    assert described(session.operations) != before
