"""What a cleanup does to sessions that have expired, and what it leaves alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from helix_store.cleanup import CleanupSummary, expired_session_cleanup
from helix_store.cleanup.expiry import expired_session_cleanup_batches
from helix_store.cleanup.workspaces import CleanupDetails
from helix_store.core.contracts import StateStore
from helix_store.core.types import SessionStatus
from helix_store.exceptions import (
    ConflictError,
    InvalidPayload,
    InvalidQuery,
    StaleStateError,
)
from helix_store.models import Checkpoint, Session
from helix_store.stores import DatabaseStateStore
from helix_store.testing.state_store.approvals import approve, ask_approval, forge_answer, use_once
from helix_store.testing.state_store.samples import contents, loaded
from helix_store.testing.state_store.tool_calls import APPROVE
from tests.cells import for_each
from tests.cleanup.conftest import LONG_AGO, later
from tests.cleanup.providers import MemoryProvider
from tests.databases import CommittedDatabase

Expired = Callable[..., str]
REFS = {"main": {"provider": "memory"}}


def cleanup(store: StateStore, provider: Any = None, **options: Any) -> CleanupSummary:
    providers = {} if provider is None else {"memory": provider}
    return expired_session_cleanup(state_store=store, workspace_providers=providers, **options)


def status_of(store: StateStore, session_id: str) -> tuple[str, str | None]:
    state = loaded(store, session_id)
    return state.status.value, state.failure_reason


EXPIRED = ("failed", "session_expired")


def test_an_expired_session_fails_with_its_reason_and_its_snapshots_go(
    store: StateStore, expired: Expired
) -> None:
    expired("session", workspace_refs=REFS, custom_state={"kept": 1})
    before = loaded(store, "session")
    provider = MemoryProvider({"session": ["one", "two"], "other": ["three"]})
    assert cleanup(store, provider) == CleanupSummary(detected=1, marked=1, snapshots_deleted=2)
    after = loaded(store, "session")
    assert status_of(store, "session") == EXPIRED
    assert after.version == before.version + 1
    assert after.custom_state == {"kept": 1}
    assert provider.deleted == ["one", "two"]
    assert cleanup(store, provider) == CleanupSummary()


@for_each("status", list(SessionStatus))
def test_only_sessions_that_have_not_ended_are_cleaned_up(
    store: StateStore, expired: Expired, status: SessionStatus
) -> None:
    expired("session")
    store.update_status("session", status, failure_reason="as it was")
    summary = cleanup(store)
    assert summary.marked == int(not status.is_terminal)
    assert status_of(store, "session") == ((status.value, "as it was") if status.is_terminal else EXPIRED)


def test_sessions_without_an_expiry_or_before_it_are_left_alone(store: StateStore) -> None:
    store.create_session("never", agent_type="agent")
    store.create_session("later", agent_type="agent", expires_at=later())
    before = [contents(store, name) for name in ("never", "later")]
    assert cleanup(store) == CleanupSummary()
    assert [contents(store, name) for name in ("never", "later")] == before


def test_the_moment_may_be_given(store: StateStore) -> None:
    expires_at = later()
    store.create_session("session", agent_type="agent", expires_at=expires_at)
    assert cleanup(store, now=expires_at - 1).detected == 0
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=expires_at)
    assert cleanup(store, now=moment).marked == 1


@for_each("page_size", [1, 2, 3, 200])
def test_pages_lose_no_session_also_when_many_expire_at_one_moment(
    store: StateStore, expired: Expired, page_size: int
) -> None:
    names = [expired(f"session-{number}") for number in range(7)]
    sums: list[CleanupSummary] = []
    summary = cleanup(store, page_size=page_size, progress=sums.append)
    assert summary == CleanupSummary(detected=7, marked=7)
    assert [status_of(store, name) for name in names] == [EXPIRED] * 7
    assert sums[-1] == summary
    assert [each.marked for each in sums] == sorted(each.marked for each in sums)


def test_a_limit_bounds_what_is_done(store: StateStore, expired: Expired) -> None:
    for number in range(5):
        expired(f"session-{number}")
    assert cleanup(store, limit=3, page_size=2).marked == 3
    assert cleanup(store, limit=3, page_size=2).marked == 2


def test_a_dry_run_only_counts(store: StateStore, expired: Expired) -> None:
    expired("session", workspace_refs=REFS)
    call = {"tool_name": "ask", "deadline": LONG_AGO, "on_expiry": "fail"}
    store.add_pending_tool_calls("session", {"call": call})
    before = contents(store, "session")
    provider = MemoryProvider({"session": ["one"]})
    assert cleanup(store, provider, dry_run=True, delete_after=0) == CleanupSummary(detected=1)
    assert (contents(store, "session"), provider.deleted) == (before, [])


def renewed(store: StateStore) -> None:
    state = loaded(store, "session")
    state.expires_at = later()
    store.save_state("session", state)


def resumed(store: StateStore) -> None:
    store.resume("session")


@pytest.mark.parametrize("save", [renewed, resumed])
def test_a_session_renewed_or_resumed_meanwhile_keeps_its_status_and_its_snapshots(
    store: StateStore, expired: Expired, save: Callable[[StateStore], None]
) -> None:
    expired("session", workspace_refs=REFS)
    store.suspend("session", kind="suspended_client_tool", context={})
    provider = MemoryProvider({"session": ["one"]})
    provider.before_listing = lambda session_id: save(store)
    assert cleanup(store, provider) == CleanupSummary(detected=1, renewed=1)
    assert loaded(store, "session").status.value == ("paused" if save is renewed else "active")
    assert provider.deleted == []
    assert cleanup(store, provider) == CleanupSummary()


def test_a_session_renewed_while_its_snapshots_go_is_not_failed(store: StateStore, expired: Expired) -> None:
    """The provider writes through the cleaner's own connection, which no lock can hold off."""
    expired("session", workspace_refs=REFS)
    provider = MemoryProvider({"session": ["one"]})
    provider.before_deleting = lambda snapshot_id: renewed(store)
    summary = cleanup(store, provider)
    assert (summary.marked, summary.renewed, summary.errors) == (0, 1, 0)
    assert loaded(store, "session").status.value == "active"


def test_a_renewal_by_another_thread_waits_for_the_snapshots(store: StateStore, expired: Expired) -> None:
    expired("session", workspace_refs=REFS)
    provider = MemoryProvider({"session": ["one"]})
    refused: list[StaleStateError] = []

    def renew() -> None:
        try:
            store.save_state("session", state, expected_version=state.version)
        except StaleStateError as error:
            refused.append(error)
        finally:
            connections.close_all()

    def renew_elsewhere(snapshot_id: str) -> None:
        renewing.start()
        renewing.join(0.05)  # it would be through by now if nothing held it off

    state = loaded(store, "session")
    state.expires_at = later()
    renewing = threading.Thread(target=renew)
    provider.before_deleting = renew_elsewhere
    summary = cleanup(store, provider)
    renewing.join()
    assert (summary.marked, summary.snapshots_deleted, len(refused)) == (1, 1, 1)
    assert status_of(store, "session") == EXPIRED


def test_a_session_written_to_meanwhile_is_looked_at_again(store: StateStore, expired: Expired) -> None:
    expired("session", workspace_refs=REFS)
    provider = MemoryProvider({"session": ["one"]})
    listings: list[str] = []

    def write_once(session_id: str) -> None:
        listings.append(session_id)
        if len(listings) == 1:
            store.append_messages("session", [{"role": "user"}])
            provider.snapshots["session"].append("two")

    provider.before_listing = write_once
    assert cleanup(store, provider) == CleanupSummary(detected=1, marked=1, snapshots_deleted=2)
    assert listings == ["session", "session"]


def test_a_session_written_to_all_the_time_is_an_error_and_not_an_endless_loop(
    store: StateStore, expired: Expired
) -> None:
    expired("session", workspace_refs=REFS)
    provider = MemoryProvider()
    provider.before_listing = lambda session_id: store.append_messages("session", [{"role": "user"}])
    assert cleanup(store, provider) == CleanupSummary(detected=1, errors=1)
    assert status_of(store, "session") == ("active", None)


@pytest.mark.parametrize("step", ["listing", "deleting"])
def test_a_provider_that_raises_stops_neither_the_loop_nor_a_later_cleanup(
    store: StateStore, expired: Expired, step: str
) -> None:
    names = [expired(f"session-{number}", workspace_refs=REFS) for number in range(5)]
    provider = MemoryProvider({name: [f"{name}.a", f"{name}.b"] for name in names})

    def refuse(name: str) -> None:
        if name in ("session-2", "session-2.b"):
            raise OSError("the disk is on fire")

    setattr(provider, f"before_{step}", refuse)
    deleted = 8 if step == "listing" else 9
    assert cleanup(store, provider, page_size=2) == CleanupSummary(
        detected=5, marked=4, errors=1, snapshots_deleted=deleted
    )
    assert status_of(store, "session-2") == ("active", None)
    setattr(provider, f"before_{step}", lambda name: None)
    assert cleanup(store, provider) == CleanupSummary(detected=1, marked=1, snapshots_deleted=10 - deleted)


@for_each("refs", [{"main": {"provider": "nobody"}}, {"main": {}}, {"main": "memory"}, {"main": None}])
def test_a_ref_without_a_provider_is_an_error_before_anything_is_deleted(
    store: StateStore, expired: Expired, refs: dict[str, Any]
) -> None:
    expired("session", workspace_refs={**REFS, **{f"other {name}": ref for name, ref in refs.items()}})
    provider = MemoryProvider({"session": ["one"]})
    assert cleanup(store, provider) == CleanupSummary(detected=1, errors=1)
    assert status_of(store, "session") == ("active", None)
    assert provider.deleted == []


def test_an_expired_suspension_cannot_be_resumed_after_its_cleanup(
    store: StateStore, expired: Expired
) -> None:
    expired("session")
    store.suspend("session", kind="suspended_client_tool", context={"at": 1})
    assert cleanup(store).marked == 1
    with pytest.raises(ConflictError):
        store.resume("session")
    with pytest.raises(ConflictError):
        store.suspend("session", kind="suspended_client_tool", context={})
    assert status_of(store, "session") == EXPIRED


def test_overdue_calls_get_their_defaults_and_others_wait_on(store: StateStore) -> None:
    store.create_session("root", agent_type="agent")
    store.create_session("child", agent_type="agent", parent_session_id="root")
    asked = {"tool_name": "ask", "deadline": LONG_AGO}
    approval = {**asked, "approval_id": "approval"}
    calls = {
        "fails": {**asked, "on_expiry": "fail"},
        "has a result": {**asked, "on_expiry": {"result": [1.0]}},
        "is rejected": {**approval, "on_expiry": "reject"},
        "fails too": {**approval, "on_expiry": "fail"},
        "waits": asked,
        "has time": {**asked, "deadline": later(), "on_expiry": "fail"},
    }
    store.add_pending_tool_calls("child", calls)
    assert cleanup(store, page_size=1) == CleanupSummary(defaults_applied=4)
    taken = store.take_tool_results("child")
    assert [sorted(answer) for answer in taken.values()] == [
        ["error", "submitted_at"],
        ["result", "submitted_at"],
        ["approved", "reason", "submitted_at"],
        ["error", "submitted_at"],
    ]
    assert taken["has a result"]["result"] == [1.0]
    assert taken["is rejected"]["approved"] is False
    assert list(loaded(store, "child").pending_client_tool_calls) == ["waits", "has time"]
    assert store.submit_tool_result("root", "fails", result=1).outcome.value == "already_completed"
    assert cleanup(store) == CleanupSummary()
    assert store.submit_tool_result("root", "waits", result=1).outcome.value == "accepted"


def test_a_default_answers_a_call_that_only_the_state_says_is_answered(store: StateStore) -> None:
    """One statement of an agent about itself must not make it wait for ever."""
    overdue = {**APPROVE, "deadline": LONG_AGO, "on_expiry": "reject"}
    for session_id in ("forged", "approved", "used", "rejected"):
        store.create_session(session_id, agent_type="agent")
        ask_approval(store, session_id, overdue)
    forge_answer(store, "forged")
    for session_id in ("approved", "used", "rejected"):
        approve(store, session_id, approved=session_id != "rejected", actor="ann")
    use_once(store, "used")
    for session_id in ("approved", "used", "rejected"):
        store.save_state(session_id, loaded(store, session_id))
    details = CleanupDetails()
    trial = expired_session_cleanup_batches(state_store=store, dry_run=True, details=details)
    assert set(trial) <= {CleanupSummary()}
    assert [(key.session_id, call.tool_call_id) for key, call in details.overdue] == [("forged", "call")]
    assert cleanup(store) == CleanupSummary(defaults_applied=1)
    assert cleanup(store) == CleanupSummary()
    answers = {name: store.take_tool_results(name)["call"] for name in ("forged", "approved", "rejected")}
    assert answers["forged"]["reason"] == "deadline_passed"
    assert [answers[name]["approved"] for name in ("approved", "rejected")] == [True, False]


def test_a_default_that_cannot_be_applied_is_an_error_and_the_others_are_applied(store: StateStore) -> None:
    """A saved state may hold anything, also an approval's default in a call that asks for a result."""
    asked = {"tool_name": "ask", "deadline": LONG_AGO}
    for name, default in (("bad", "reject"), ("good", "fail"), ("odd", 7)):
        state = store.create_session(name, agent_type="agent")
        state.pending_client_tool_calls = {f"call {name}": {**asked, "on_expiry": default}}
        store.save_state(name, state)
    assert cleanup(store) == CleanupSummary(defaults_applied=1, errors=1)
    assert list(store.take_tool_results("good")) == ["call good"]


def test_sessions_long_expired_are_deleted_with_their_trees(store: StateStore, expired: Expired) -> None:
    days = 24 * 3_600_000
    now = LONG_AGO + 40 * days
    expired("old")
    expired("recent", expires_at=now - 10 * days)
    expired("has a live child")
    store.create_session("ended", agent_type="agent", parent_session_id="old")
    store.update_status("ended", "completed")
    store.create_session("live", agent_type="agent", parent_session_id="has a live child")
    expired("failed otherwise")
    store.update_status("failed otherwise", "failed", failure_reason="boom")
    summary = cleanup(store, now=now, delete_after=30, page_size=1)
    assert (summary.marked, summary.deleted, summary.errors) == (3, 2, 0)
    left = {session.session_id for session in store.list_sessions().sessions}
    assert left == {"recent", "has a live child", "live", "failed otherwise"}
    assert cleanup(store, now=now, delete_after=timedelta(days=5)).deleted == 1


def test_snapshots_of_sub_sessions_are_deleted_with_the_tree(store: StateStore, expired: Expired) -> None:
    expired("old", workspace_refs=REFS)
    for name, parent in (("ended", "old"), ("below", "ended")):
        state = store.create_session(name, agent_type="agent", parent_session_id=parent)
        state.workspace_refs = REFS
        store.save_state(name, state)
        store.update_status(name, "completed")
    provider = MemoryProvider({"old": ["1"], "ended": ["2"], "below": ["3"], "other": ["4"]})
    # A provider that is not configured keeps the tree, whose snapshots would be lost.
    assert cleanup(store, provider).marked == 1
    summary = cleanup(store, delete_after=30)
    assert (summary.deleted, summary.errors) == (0, 1)
    summary = cleanup(store, provider, delete_after=30)
    assert (summary.deleted, summary.snapshots_deleted, summary.errors) == (3, 2, 0)
    assert sorted(provider.deleted) == ["1", "2", "3"]


def test_a_session_that_has_another_end_since_it_was_marked_is_not_deleted(
    store: StateStore, expired: Expired
) -> None:
    expired("s")
    assert cleanup(store).marked == 1
    store.update_status("s", "completed", failure_reason="session_expired")
    assert cleanup(store, delete_after=30).deleted == 0
    assert status_of(store, "s")[0] == "completed"


@for_each(
    "bad",
    [
        {"page_size": 0},
        {"page_size": "many"},
        {"limit": 0},
        {"limit": -1},
        {"limit": 1.5},
        {"now": 1_700_000_000},
        {"now": 253_402_300_800_000},
        {"now": "tomorrow"},
        {"delete_after": -1},
        {"delete_after": timedelta(seconds=-1)},
        {"delete_after": "long"},
        {"delete_after": float("nan")},
        {"delete_after": 10**12},
        {"delete_after": True},
        {"dry_run": "no"},
        {"dry_run": None},
        {"dry_run": 0},
        {"progress": 5},
        {"using": "default"},
    ],
    ids=repr,
    shared=True,
)
def test_arguments_that_make_no_sense_are_refused(
    store: StateStore, expired: Expired, bad: dict[str, Any]
) -> None:
    if not store.session_exists("session"):
        expired("session")
    (name,) = bad
    with pytest.raises(InvalidQuery, match=name) as refused:
        cleanup(store, **bad)
    assert refused.value.path == f"/{name}"
    assert status_of(store, "session") == ("active", None)


class FixedProvider(MemoryProvider):
    """Lists the same for every session, whatever it is."""

    listed: Any = ()

    def list_snapshots(self, session_id: str, ref: Mapping[str, Any], *, tenant: str = "") -> Any:
        return self.listed


@pytest.mark.thorough
def test_a_provider_that_lists_no_ids_deletes_nothing(store: StateStore, expired: Expired) -> None:
    """One text is a collection of texts, each of which could be the id of another session's snapshot."""
    provider = FixedProvider()
    listed: list[Any] = [
        "snap-42",
        b"snap",
        {"snap": 1},
        ["a", 5],
        ["a", None],
        ["a", ""],
        ["a", b"b"],
        5,
        None,
    ]
    for number, result in enumerate(listed):
        provider.listed = result
        session_id = expired(f"session-{number}", workspace_refs=REFS)
        assert cleanup(store, provider, limit=1) == CleanupSummary(detected=1, errors=1), result
        assert status_of(store, session_id) == ("active", None)
        store.delete_session(session_id)
    # A tree that is deleted has the snapshots of sub-sessions that have ended in another way.
    expired("root")
    cleanup(store, provider)
    state = store.create_session("child", agent_type="agent", parent_session_id="root")
    state.workspace_refs, state.status = REFS, SessionStatus.COMPLETED
    store.save_state("child", state)
    provider.listed = "snap-42"
    assert cleanup(store, provider, delete_after=0) == CleanupSummary(errors=1)
    assert store.session_exists("root")
    assert provider.deleted == []
    provider.listed = iter(("one", "two"))
    assert cleanup(store, provider, delete_after=0) == CleanupSummary(deleted=2, snapshots_deleted=2)
    assert provider.deleted == ["one", "two"]


@for_each("expires_at", [1_900_000_000, 253_402_300_800_000, -1, "tomorrow", 1.5, True])
def test_an_expiry_in_seconds_or_beyond_the_calendar_is_refused_before_it_is_stored(
    store: StateStore, expires_at: Any
) -> None:
    with pytest.raises(InvalidPayload):
        store.create_session("session", agent_type="agent", expires_at=expires_at)
    state = store.create_session("other", agent_type="agent")
    state.expires_at = expires_at
    with pytest.raises(InvalidPayload):
        store.save_state("other", state)
    assert not store.session_exists("session")


def test_what_is_no_provider_or_no_store_is_refused(store: StateStore) -> None:
    with pytest.raises(TypeError):
        cleanup(store, object())
    with pytest.raises(TypeError):
        expired_session_cleanup(state_store=object(), workspace_providers={})  # type: ignore[arg-type]


def test_providers_come_from_the_settings(store: StateStore, expired: Expired) -> None:
    expired("session", workspace_refs=REFS)
    providers = {"memory": "tests.cleanup.providers.MemoryProvider"}
    with override_settings(HELIX_STORE={"WORKSPACE_PROVIDERS": providers}):
        assert expired_session_cleanup(state_store=store).marked == 1
    for wrong in ("tests.cleanup.providers.Nobody", "datetime.datetime", "datetime.UTC", "nonsense"):
        with (
            override_settings(HELIX_STORE={"WORKSPACE_PROVIDERS": {"memory": wrong}}),
            pytest.raises(ImproperlyConfigured),
        ):
            expired_session_cleanup(state_store=store)


def test_every_tenant_of_a_database_is_cleaned_up(empty_db: CommittedDatabase) -> None:
    stores = [DatabaseStateStore(empty_db.alias, tenant=tenant) for tenant in ("", "a", "b")]
    for each in stores:
        each.create_session("session", agent_type="agent", expires_at=LONG_AGO)
        each.create_session("waits", agent_type="agent")
        each.add_pending_tool_calls(
            "waits", {"call": {"tool_name": "ask", "deadline": LONG_AGO, "on_expiry": "fail"}}
        )
    assert expired_session_cleanup(state_store=stores[1], workspace_providers={}).marked == 1
    summary = expired_session_cleanup(using=empty_db.alias, workspace_providers={}, page_size=1)
    assert summary == CleanupSummary(detected=2, marked=2, defaults_applied=2)
    assert [status_of(each, "session") for each in stores] == [EXPIRED] * 3
    assert [list(each.take_tool_results("waits")) for each in stores] == [["call"]] * 3


def test_a_session_that_cannot_be_read_stops_nothing(committed_db: CommittedDatabase) -> None:
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    call = {"tool_name": "ask", "deadline": LONG_AGO, "on_expiry": "fail"}
    for name in ("a", "b", "c"):
        store.create_session(name, agent_type="agent", expires_at=LONG_AGO)
        store.create_session(f"{name} waits", agent_type="agent")
        store.add_pending_tool_calls(f"{name} waits", {"call": call})
    rows = Session.objects.using(committed_db.alias).filter(tenant=committed_db.tenant)
    states = Checkpoint.objects.using(committed_db.alias)
    states.filter(session_id=rows.get(session_id="b").pk).update(envelope="{broken")
    rows.filter(session_id="b waits").update(pending_client_tool_calls="{broken")
    assert [found.session_id for found in store.find_expired_pending()] == ["a waits", "c waits"]
    assert cleanup(store) == CleanupSummary(detected=3, marked=2, errors=2, defaults_applied=2)


@for_each("meanwhile", ["renewed", "ended", "given something to own"])
def test_a_session_that_changes_between_the_look_and_the_mark_is_looked_at_again(
    committed_db: CommittedDatabase, meanwhile: str
) -> None:
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    for name in ("a", "b"):
        store.create_session(name, agent_type="agent", expires_at=LONG_AGO)
    changed = False

    def change(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        nonlocal changed
        result = execute(sql, params, many, context)
        if "envelope" in sql and not changed:
            changed = True
            state = store.load_state("a")
            assert state is not None
            if meanwhile == "renewed":
                state.expires_at = None
            elif meanwhile == "ended":
                state.status = SessionStatus.COMPLETED
            else:
                state.workspace_refs = {"w": {"provider": "nobody"}}
            store.save_state("a", state)
        return result

    with committed_db.connection.execute_wrapper(change):
        summary = cleanup(store)
    expected = {
        "renewed": CleanupSummary(detected=2, marked=1, renewed=1),
        "ended": CleanupSummary(detected=1, marked=1),
        "given something to own": CleanupSummary(detected=2, marked=1, errors=1),
    }
    assert summary == expected[meanwhile]


def test_sessions_that_own_nothing_are_marked_a_page_at_a_time(committed_db: CommittedDatabase) -> None:
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    for number in range(30):
        store.create_session(f"s-{number}", agent_type="agent", expires_at=LONG_AGO)
    with CaptureQueriesContext(committed_db.connection) as captured:
        summary = expired_session_cleanup(state_store=store, page_size=10)
    assert summary.marked == 30
    assert sum(query["sql"].startswith("UPDATE") for query in captured.captured_queries) == 3
