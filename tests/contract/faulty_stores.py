"""Stores with one fault each, and the test of the suite that must catch it.

Not collected by itself: `test_the_suite` runs it and expects every class to fail at the test that it names.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from helix_store.core.dicts import AnyMessage
from helix_store.core.limits import Limits
from helix_store.core.types import (
    Checkpoint,
    InterruptRequest,
    MessagePage,
    Run,
    SessionPage,
    SessionState,
    SessionStatus,
    StagedChanges,
    StatusChange,
    StatusConflict,
    StepCommit,
    StepInfo,
)
from helix_store.engine.memory import MemoryWorld
from helix_store.exceptions import (
    InvalidCursor,
    SessionExists,
    SessionNotFound,
)
from helix_store.stores.store import InMemoryStateStore
from helix_store.testing import state_store as parts
from helix_store.testing.state_store.samples import loaded

FAULTS: dict[str, str] = {}
"""Class of the faulty store: the test that catches it."""


def caught_by(test: str, part: type[parts.StoreTests]) -> Callable[[type[InMemoryStateStore]], type]:
    """Put a faulty store under one part of the suite, as a test class of this module."""
    assert hasattr(part, test), f"{part.__name__} has no test {test}"

    def decorate(store_class: type[InMemoryStateStore]) -> type:
        class TestFaultyStore(part):  # type: ignore[misc, valid-type]  # a class chosen at run time
            @pytest.fixture(autouse=True)
            def one_world(self) -> None:
                self.world = MemoryWorld()

            def make_store(self, *, tenant: str = "", limits: Limits | None = None) -> Any:
                return store_class(tenant=tenant, limits=limits, world=self.world)

        name = f"Test{store_class.__name__}"
        TestFaultyStore.__name__ = TestFaultyStore.__qualname__ = name
        globals()[name] = TestFaultyStore
        FAULTS[name] = test
        return store_class

    return decorate


# --- Sessions -------------------------------------------------------------------------------------


@caught_by("test_a_taken_id_is_refused_and_the_session_stays_as_it_is", parts.SessionContract)
class OverwritesATakenId(InMemoryStateStore):
    def create_session(self, session_id: str | None = None, **given: Any) -> SessionState:
        try:
            return super().create_session(session_id, **given)
        except SessionExists:
            assert session_id is not None
            self.delete_session(session_id)
            return super().create_session(session_id, **given)


@caught_by("test_what_a_load_returns_is_detached_from_the_store", parts.SessionContract)
class HandsOutItsOwnState(InMemoryStateStore):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._loaded: dict[tuple[str, int], SessionState] = {}

    def load_state(self, session_id: str) -> SessionState | None:
        state = super().load_state(session_id)
        return None if state is None else self._loaded.setdefault((session_id, state.version), state)


@caught_by("test_a_local_sub_session_goes_with_the_session_that_refers_to_it", parts.SessionContract)
class LeavesSubSessionsBehind(InMemoryStateStore):
    def delete_session(self, session_id: str, *, keep_usage: bool = False) -> int:
        if not self.session_exists(session_id):
            return 0
        self._scope.forget(session_id)
        return 1


@caught_by("test_values_for_what_the_store_owns_are_ignored", parts.SavingContract)
class BelievesTheVersionItIsGiven(InMemoryStateStore):
    def save_state(self, session_id: str, state: SessionState, **guard: Any) -> int:
        version = super().save_state(session_id, state, **guard)
        return max(version, state.version)


@caught_by("test_a_save_on_top_of_another_version_writes_nothing", parts.SavingContract)
class WritesBeforeItChecks(InMemoryStateStore):
    def save_state(self, session_id: str, state: SessionState, **guard: Any) -> int:
        super().save_state(session_id, state)
        return super().save_state(session_id, state, **guard)


@caught_by("test_every_field_comes_back_exactly_and_no_other_changes", parts.SavingContract)
class TakesEmptyForNothing(InMemoryStateStore):
    def load_state(self, session_id: str) -> SessionState | None:
        state = super().load_state(session_id)
        if state is not None:
            state.suspension_context = state.suspension_context or None
        return state


@caught_by(
    "test_of_many_that_compare_and_set_at_once_one_wins_and_the_others_see_its_write", parts.StatusContract
)
class ReadsThenWrites(InMemoryStateStore):
    def compare_and_set_status(
        self,
        session_id: str,
        expected: Collection[SessionStatus | str],
        status: SessionStatus | str,
        **given: Any,
    ) -> StatusChange | StatusConflict:
        state = loaded(self, session_id)
        if state.status not in list(expected):
            return StatusConflict(current_status=state.status, current_version=state.version)
        # Another caller that comes at the same time has read as well before either of them writes.
        with suppress(threading.BrokenBarrierError):
            vars(self).setdefault("_readers", threading.Barrier(2)).wait(timeout=0.5)
        return StatusChange(new_version=self.update_status(session_id, status, **given))


@caught_by("test_a_value_replaces_and_an_array_appends_per_top_level_key", parts.CustomStateContract)
class MergesDeeply(InMemoryStateStore):
    def merge_custom_state(self, session_id: str, changes: Mapping[str, Any], **given: Any) -> list[str]:
        stored = loaded(self, session_id).custom_state
        deep = {
            key: {**stored[key], **value}
            if isinstance(value, dict) and isinstance(stored.get(key), dict)
            else value
            for key, value in changes.items()
        }
        return super().merge_custom_state(session_id, deep, **given)


# --- Lists ----------------------------------------------------------------------------------------


@caught_by("test_filters_are_exact_and_all_of_them_must_hold", parts.ListingContract)
class TakesNoParentForAnyParent(InMemoryStateStore):
    def list_sessions(self, **query: Any) -> SessionPage:
        if query.get("parent_session_id", "") is None:
            del query["parent_session_id"]
        return super().list_sessions(**query)


@caught_by("test_cursors_lead_through_all_pages_once", parts.PagingContract)
class SkipsARowAtEachPage(InMemoryStateStore):
    def list_sessions(self, **query: Any) -> SessionPage:
        page = super().list_sessions(**query)
        return page if query.get("cursor") is None else replace(page, sessions=page.sessions[1:])


@caught_by("test_a_cursor_of_another_query_is_refused", parts.PagingContract)
class TakesAnyCursor(InMemoryStateStore):
    def list_sessions(self, **query: Any) -> SessionPage:
        try:
            return super().list_sessions(**query)
        except InvalidCursor:
            return super().list_sessions(**{**query, "cursor": None})


# --- Messages -------------------------------------------------------------------------------------


@caught_by("test_one_bad_message_keeps_all_of_them_out", parts.MessageContract)
class AppendsOneByOne(InMemoryStateStore):
    def append_messages(self, session_id: str, messages: Sequence[AnyMessage], **guard: Any) -> int:
        for message in messages:
            super().append_messages(session_id, [message], **guard)
        return self.get_message_count(session_id)


@caught_by("test_a_page_of_messages", parts.MessageContract)
class AlwaysHasMore(InMemoryStateStore):
    def get_messages(self, session_id: str, **query: Any) -> MessagePage:
        page = super().get_messages(session_id, **query)
        return replace(page, has_more=len(page.messages) < page.total)


@caught_by("test_checkpoints_beyond_the_boundary_go_and_the_state_stays", parts.MessageContract)
class TruncatesByRestoring(InMemoryStateStore):
    def truncate_messages(self, session_id: str, keep: int, *, expected_version: int | None = None) -> int:
        heads = self.list_checkpoints(session_id).items if type(keep) is int else []
        for head in heads:
            if head.message_count == keep:
                return self.restore_checkpoint(
                    session_id, head.checkpoint_id, expected_version=expected_version
                )
        return super().truncate_messages(session_id, keep, expected_version=expected_version)


# --- Staging and steps ----------------------------------------------------------------------------


@caught_by("test_staging_a_tool_call_again_replaces_it_in_its_place", parts.StagingContract)
class MovesARestagedCallToTheEnd(InMemoryStateStore):
    def stage_changes(self, session_id: str, step_id: str, staged: StagedChanges | Mapping[str, Any]) -> None:
        record = self._scope.find(session_id)
        if record is not None and isinstance(staged, StagedChanges):
            record.staged.pop((step_id, staged.tool_call_id), None)
        super().stage_changes(session_id, step_id, staged)


@caught_by("test_one_bad_patch_keeps_all_changes_out_and_the_staging_in_place", parts.StagingContract)
class DropsStagingThatFails(InMemoryStateStore):
    def promote_staging(self, session_id: str, step_id: str, **guard: Any) -> int:
        try:
            return super().promote_staging(session_id, step_id, **guard)
        except Exception:
            self.discard_staging(session_id, step_id)
            raise


@caught_by("test_a_step_commits_state_messages_staging_and_checkpoint_as_one_version", parts.StepContract)
class CommitsAStepInTwoWrites(InMemoryStateStore):
    def save_state_and_promote_staging(
        self, session_id: str, state: SessionState, append_messages: Any, step: Any, **given: Any
    ) -> StepCommit:
        commit = super().save_state_and_promote_staging(session_id, state, [], step, **given)
        self.append_messages(session_id, append_messages)
        return commit


@caught_by("test_a_repeat_comes_before_the_version_check", parts.OperationContract)
class ChecksTheVersionFirst(InMemoryStateStore):
    def save_state_and_promote_staging(
        self,
        session_id: str,
        state: SessionState,
        append_messages: Any,
        step: StepInfo | Mapping[str, Any],
        *,
        expected_version: int | None = None,
        **given: Any,
    ) -> StepCommit:
        if expected_version is not None:
            self._check_version(session_id, expected_version)
        return super().save_state_and_promote_staging(
            session_id, state, append_messages, step, expected_version=expected_version, **given
        )

    def _check_version(self, session_id: str, expected_version: int) -> None:
        self.append_messages(session_id, [], expected_version=expected_version)


# --- Checkpoints ----------------------------------------------------------------------------------


@caught_by("test_the_checkpoint_of_another_session_is_none", parts.CheckpointContract)
class FindsCheckpointsByIdAlone(InMemoryStateStore):
    def get_checkpoint(self, session_id: str, checkpoint_id: str) -> Checkpoint | None:
        found = super().get_checkpoint(session_id, checkpoint_id)
        for other in self.get_all_session_ids():
            found = found or super().get_checkpoint(other, checkpoint_id)
        return found


@caught_by("test_pruning_keeps_exactly_the_newest", parts.CheckpointContract)
class PrunesOneTooFew(InMemoryStateStore):
    def prune_checkpoints(self, session_id: str, *, keep: int) -> int:
        return super().prune_checkpoints(session_id, keep=keep + 1 if type(keep) is int else keep)


@caught_by("test_later_checkpoints_and_all_staging_are_dropped", parts.RestoringContract)
class KeepsStagingOverARestore(InMemoryStateStore):
    def restore_checkpoint(self, session_id: str, checkpoint_id: str, **guard: Any) -> int:
        record = self._scope.find(session_id)
        staged = {} if record is None else record.staged
        version = super().restore_checkpoint(session_id, checkpoint_id, **guard)
        self._scope.sessions[session_id].staged.update(staged)
        return version


@caught_by("test_a_branch_keeps_who_it_is_and_drops_what_was_under_way", parts.BranchingContract)
class BranchesWithPendingCalls(InMemoryStateStore):
    def branch_session(self, session_id: str, checkpoint_id: str | None = None, **given: Any) -> SessionState:
        branch = super().branch_session(session_id, checkpoint_id, **given)
        branch.pending_client_tool_calls = loaded(self, session_id).pending_client_tool_calls
        return branch


# --- Runs, sub-sessions, interrupts ---------------------------------------------------------------


@caught_by("test_starting_a_run_clears_what_is_left_of_the_last_one", parts.InterruptContract)
class LetsARequestHitTheNextRun(InMemoryStateStore):
    def start_run(self, session_id: str, run_id: str | None = None, **given: Any) -> Run:
        pending = self.check_interrupt(session_id)
        run = super().start_run(session_id, run_id, **given)
        if pending is not None:
            self.request_interrupt(session_id, kind=pending.kind, reason=pending.reason)
        return run


@caught_by("test_an_interrupt_never_replaces_an_abort", parts.InterruptContract)
class LetsTheLastRequestStand(InMemoryStateStore):
    def request_interrupt(self, session_id: str, **given: Any) -> InterruptRequest:
        self.clear_interrupt(session_id)
        return super().request_interrupt(session_id, **given)


@caught_by("test_a_start_in_an_active_session_is_no_new_version", parts.RunContract)
class BumpsTheVersionForEveryRun(InMemoryStateStore):
    def start_run(self, session_id: str, run_id: str | None = None, **given: Any) -> Run:
        run = super().start_run(session_id, run_id, **given)
        self.update_status(session_id, "active")
        return run


@caught_by("test_an_update_changes_what_is_given_and_leaves_the_rest", parts.SubSessionContract)
class ClearsWhatIsNotGiven(InMemoryStateStore):
    def update_sub_session_ref(self, session_id: str, sub_session_id: str, **given: Any) -> Any:
        return super().update_sub_session_ref(session_id, sub_session_id, **{"output": {}, **given})


# --- Everywhere -----------------------------------------------------------------------------------


@caught_by("test_a_session_of_another_tenant_is_as_unknown_as_one_that_does_not_exist", parts.TenantContract)
class SeesEveryTenant(InMemoryStateStore):
    def __init__(self, *, tenant: str = "", **given: Any) -> None:
        super().__init__(**given)


@caught_by("test_every_other_read_says_that_the_session_is_not_found", parts.UnknownSessionContract)
class TakesUnknownForEmpty(InMemoryStateStore):
    def get_message_count(self, session_id: str) -> int:
        try:
            return super().get_message_count(session_id)
        except SessionNotFound:
            return 0


@caught_by("test_no_method_takes_a_bad_session_id", parts.IdentifierContract)
class StripsIds(InMemoryStateStore):
    def session_exists(self, session_id: str) -> bool:
        return super().session_exists(str(session_id).strip().replace("\x00", "") or "empty")


@caught_by("test_a_payload_comes_back_exactly_wherever_it_was_put", parts.PayloadContract)
class SortsKeys(InMemoryStateStore):
    def load_state(self, session_id: str) -> SessionState | None:
        state = super().load_state(session_id)
        if state is not None:
            state.custom_state = _sorted(state.custom_state)
        return state


@caught_by("test_a_payload_comes_back_exactly_wherever_it_was_put", parts.PayloadContract)
class TakesWholeFloatsForIntegers(InMemoryStateStore):
    def get_messages(self, session_id: str, **query: Any) -> MessagePage:
        page = super().get_messages(session_id, **query)
        return replace(page, messages=[_with_integers(message) for message in page.messages])


@caught_by("test_a_value_that_is_not_plain_json_is_refused_at_every_entrance", parts.PayloadContract)
class ReadsTuplesAsLists(InMemoryStateStore):
    def merge_custom_state(self, session_id: str, changes: Mapping[str, Any], **given: Any) -> list[str]:
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in changes.items()}
        return super().merge_custom_state(session_id, plain, **given)


@caught_by("test_merges_that_grow_the_state_over_the_limit_are_refused", parts.LimitContract)
class ChecksWhatItIsGivenOnly(InMemoryStateStore):
    def merge_custom_state(self, session_id: str, changes: Mapping[str, Any], **given: Any) -> list[str]:
        unlimited = InMemoryStateStore(tenant=self.tenant, world=self.world)
        return unlimited.merge_custom_state(session_id, changes, **given)


@caught_by("test_a_field_that_cannot_be_stored_keeps_the_whole_state_out", parts.ArgumentContract)
class RoundsCounters(InMemoryStateStore):
    def save_state(self, session_id: str, state: SessionState, **guard: Any) -> int:
        if isinstance(state.step_count, float):
            state.step_count = int(state.step_count)
        return super().save_state(session_id, state, **guard)


@caught_by("test_a_write_that_changes_the_state_or_the_messages_is_one_new_version", parts.VersionContract)
class BumpsTwice(InMemoryStateStore):
    def increment_step_count(self, session_id: str) -> int:
        self.update_status(session_id, loaded(self, session_id).status)
        return super().increment_step_count(session_id)


@caught_by("test_a_method_takes_the_arguments_of_the_contract", parts.SignatureContract)
class HasAnotherDefault(InMemoryStateStore):
    def list_runs(self, session_id: str, *, limit: int = 20, offset: int = 0) -> list[Run]:
        return super().list_runs(session_id, limit=limit, offset=offset)


@caught_by("test_the_store_is_accepted_where_a_state_store_is_needed", parts.SignatureContract)
class LacksATwin(InMemoryStateStore):
    aload_state = None  # type: ignore[assignment]  # the fault


@caught_by("test_a_twin_does_what_its_method_does", parts.AsyncTwinContract)
class HasATwinThatDoesNothing(InMemoryStateStore):
    async def aincrement_step_count(self, session_id: str) -> int:
        return loaded(self, session_id).step_count + 1


def _sorted(value: Any) -> Any:
    if isinstance(value, list):
        return [_sorted(item) for item in value]
    return {key: _sorted(value[key]) for key in sorted(value)} if isinstance(value, dict) else value


def _with_integers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_integers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_integers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
