"""Payloads keep value, type and key order in every back end, by example and by property."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from helix_store.core.contracts import StateStore
from helix_store.core.limits import Limits
from helix_store.core.types import StagedChanges, SubSessionRef
from helix_store.exceptions import HelixStoreError
from helix_store.stores import DatabaseStateStore
from helix_store.stores.store import InMemoryStateStore
from helix_store.testing.state_store.payloads import ENTRANCES
from helix_store.testing.state_store.samples import (
    commit_step,
    contents,
    full_session,
    loaded,
)
from tests.cells import for_each
from tests.strategies import HOSTILE_DOCUMENTS, REFUSED_DOCUMENTS, exact_form, json_objects, messages

# Every example makes a session of its own, so that the examples may share the store.
by_property = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture
def limits() -> Limits | None:
    return None


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def store(request: pytest.FixtureRequest, limits: Limits | None) -> StateStore:
    if request.param == "memory":
        return InMemoryStateStore(limits=limits)
    database = request.getfixturevalue(f"{request.param}_db")
    return DatabaseStateStore(database.alias, tenant=database.tenant, limits=limits)


def new_session(store: StateStore, **given: Any) -> str:
    return store.create_session(agent_type="agent", **given).session_id


def check_custom_state(store: StateStore, document: dict[str, Any]) -> None:
    exact = exact_form(document)
    session_id = new_session(store, custom_state=document)
    assert exact_form(loaded(store, session_id).custom_state) == exact
    blank = new_session(store)
    commit = commit_step(store, blank, 1, custom_state=document)
    assert exact_form(loaded(store, blank).custom_state) == exact
    checkpoint = store.get_checkpoint(blank, commit.checkpoint_id)
    assert checkpoint is not None
    assert exact_form(checkpoint.state.custom_state) == exact
    assert exact_form(store.branch_session(blank).custom_state) == exact
    store.update_status(blank, "paused")
    assert exact_form(loaded(store, blank).custom_state) == exact
    store.restore_checkpoint(blank, commit.checkpoint_id)
    assert exact_form(loaded(store, blank).custom_state) == exact


def check_messages(store: StateStore, message: dict[str, Any]) -> None:
    session_id = new_session(store)
    store.append_messages(session_id, [message, message])
    assert exact_form(store.get_messages(session_id).messages) == exact_form([message, message])
    assert exact_form(list(store.iter_messages(session_id))) == exact_form([message, message])
    branch = store.branch_session(session_id)
    assert exact_form(store.get_messages(branch.session_id).messages) == exact_form([message, message])


def check_staged_changes(store: StateStore, document: dict[str, Any]) -> None:
    session_id = new_session(store)
    staged = [
        StagedChanges(tool_call_id="patch", patches=[{"op": "add", "path": "/patched", "value": document}]),
        StagedChanges(tool_call_id="merge", merge_changes={"merged": document}),
    ]
    for changes in staged:
        store.stage_changes(session_id, "step", changes)
    assert exact_form(store.get_staged_changes(session_id, "step")) == exact_form(staged)
    store.promote_staging(session_id, "step")
    promoted = {"patched": document, "merged": document}
    assert exact_form(loaded(store, session_id).custom_state) == exact_form(promoted)


def check_run_error(store: StateStore, document: dict[str, Any]) -> None:
    session_id = new_session(store)
    store.start_run(session_id, "run")
    updated = store.update_run(session_id, "run", status="failed", error=document)
    (listed,) = store.list_runs(session_id)
    assert exact_form(updated.error) == exact_form(listed.error) == exact_form(document)


def check_ref_output(store: StateStore, document: dict[str, Any]) -> None:
    session_id = new_session(store)
    store.add_sub_session_refs(
        session_id, [SubSessionRef(sub_session_id="sub", agent_type="agent", remote=document)]
    )
    store.update_sub_session_ref(session_id, "sub", output=document, error=[document])
    (ref,) = store.get_sub_session_refs(session_id)
    assert exact_form([ref.remote, ref.output, ref.error]) == exact_form([document, document, [document]])


# --- By example -----------------------------------------------------------------------------------

HOSTILE = [document for document in HOSTILE_DOCUMENTS if exact_form(document).count("[") < 150]
"""All but the deepest, which fits only where nothing is around it."""


@for_each("document", HOSTILE_DOCUMENTS)
def test_a_hostile_document_comes_back_exactly_as_custom_state(
    store: StateStore, document: dict[str, Any]
) -> None:
    check_custom_state(store, document)


@for_each("document", HOSTILE)
def test_a_hostile_document_comes_back_exactly_from_everywhere_else(
    store: StateStore, document: dict[str, Any]
) -> None:
    check_messages(store, {**document, "role": "user"})
    check_staged_changes(store, document)
    check_run_error(store, document)
    check_ref_output(store, document)


# Some documents stand for endless text: the smaller the limit, the sooner that is known.
@pytest.mark.parametrize("limits", [Limits(max_state_bytes=50_000, max_staged_bytes=50_000)], ids=["small"])
def test_a_refused_document_is_stored_nowhere(store: StateStore, request: pytest.FixtureRequest) -> None:
    full_session(store, "session")
    before = contents(store, "session")

    @for_each("document, error", REFUSED_DOCUMENTS)
    @for_each("entrance", ENTRANCES)
    def enter(document: dict[Any, Any], error: type[HelixStoreError], entrance: str) -> None:
        with pytest.raises(error):
            ENTRANCES[entrance](store, document)

    enter(request=request)
    assert contents(store, "session") == before
    assert not store.session_exists("new")


# --- By property ----------------------------------------------------------------------------------


@by_property
@given(document=json_objects(), message=messages())
def test_any_document_comes_back_exactly(
    store: StateStore, document: dict[str, Any], message: dict[str, Any]
) -> None:
    check_custom_state(store, document)
    check_messages(store, message)
    check_staged_changes(store, document)
    check_run_error(store, document)
    check_ref_output(store, document)
