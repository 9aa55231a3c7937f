"""The stores of one database and tenant that a handle needs; a third-party state store in the same form."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import NoReturn

from django.db.backends.base.base import BaseDatabaseWrapper

from helix_store import conf
from helix_store.budgets.store import BudgetStoreBase
from helix_store.core.approvals import ApprovedCall
from helix_store.core.contracts import StateStore, UsageStore, require_state_store
from helix_store.core.limits import Limits
from helix_store.core.manager_contracts import LockManager
from helix_store.core.merging import with_staged
from helix_store.core.types import SessionState, StagedChanges
from helix_store.exceptions import InvalidPayload, NotSupportedOnBackend
from helix_store.sessions.requests import (
    CommittedStep,
    OpenedStep,
    StagedRow,
    StepWrite,
    are_stored,
    default_step_id,
    dropped_staging,
)


class Parts:
    """The stores of one database and tenant, and their common transaction."""

    is_atomic = True
    """True if several calls can be one transaction, or if the data is lost anyway when the process ends."""

    sessions: StateStore

    @property
    def locks(self) -> LockManager:
        raise NotImplementedError

    @property
    def usage(self) -> UsageStore:
        raise NotImplementedError

    @property
    def budgets(self) -> BudgetStoreBase:
        raise NotImplementedError

    @property
    def limits(self) -> Limits:
        raise NotImplementedError

    @property
    def connection_of_caller(self) -> BaseDatabaseWrapper | None:
        """The connection whose open transaction the caller's writes are part of, if there is one.

        Other connections cannot see these writes until that transaction is committed.
        """
        return None

    def approved_call(self, session_id: str, tool_call_id: str) -> tuple[int, ApprovedCall]:
        """Return the version of a session and a call that was approved in it.

        Raises `NotApproved` and `ApprovalUsed`.
        """
        raise NotImplementedError

    def load(self, session_id: str) -> SessionState | None:
        """Return the current state of a session, whose id is valid."""
        return self.sessions.load_state(session_id)

    def open_step(
        self, session_id: str, step_id: str | None, run_id: str | None, *, is_capped: bool
    ) -> OpenedStep | None:
        """Return the data with which a step begins, or ``None`` if the session does not exist.

        ``step_id`` may be the default id.
        """
        state = self.sessions.load_state(session_id)
        if state is None:
            return None
        interrupt = None if run_id is None else self.sessions.check_interrupt(session_id, run_id=run_id)
        staged = self.sessions.get_staged_changes(session_id, step_id or default_step_id(state))
        return OpenedStep(state, bool(staged), interrupt)

    def stage(self, session_id: str, step_id: str, changes: StagedChanges) -> StagedRow | None:
        """Stage a change, and return its row if the step can promote the row without reading it."""
        self.sessions.stage_changes(session_id, step_id, changes)
        return None

    def commit_step(self, step: StepWrite) -> CommittedStep:
        """Commit a step and the calls that belong to it, in one transaction if the store supports it.

        Raises `ConflictError` if any change that the step staged no longer exists.
        """
        raise NotImplementedError


class HasParts:
    """A store that belongs to the stores of its database and tenant."""

    @property
    def _parts(self) -> Parts:
        """The stores of the same database and tenant."""
        raise NotImplementedError


class ThirdPartyStore(Parts):
    """A state store that only has the calls of the contract.

    A process can be killed between two calls. A call made before a step must be valid or have no effect
    without the step; a call made after it must be repeatable from the stored data.
    """

    is_atomic = False

    def __init__(self, sessions: StateStore) -> None:
        require_state_store(sessions)
        self.sessions = sessions

    @property
    def locks(self) -> LockManager:
        raise self._has_no("locks", "lock manager")

    @property
    def usage(self) -> UsageStore:
        raise self._has_no("usage", "usage store")

    @property
    def budgets(self) -> NoReturn:
        raise NotSupportedOnBackend(f"A {type(self.sessions).__name__} has no budgets.")

    @property
    def limits(self) -> Limits:
        limits = getattr(self.sessions, "limits", None)
        return limits if isinstance(limits, Limits) else conf.limits()

    def approved_call(self, session_id: str, tool_call_id: str) -> NoReturn:
        raise NotSupportedOnBackend(f"A {type(self.sessions).__name__} does not keep approvals.")

    def commit_step(self, step: StepWrite) -> CommittedStep:
        if step.record is not None:
            step.record()
        return replace(step, record=None).written_by(self._save)

    def _save(self, step: StepWrite) -> CommittedStep:
        """Promote staged changes here: the store could also do this, but it would not return them.

        If this process removes them, nobody else has removed them in the meantime.
        """
        store, session_id, step_id = self.sessions, step.session_id, step.info.step_id
        state = step.state
        staged = store.get_staged_changes(session_id, step_id)
        if not are_stored(step.staged or {}, staged):
            raise dropped_staging(step_id)
        if staged:
            state = copy.copy(state)
            state.custom_state = with_staged(state.custom_state, staged, limits=self.limits)
            if store.discard_staging(session_id, step_id) != len(staged):
                raise dropped_staging(step_id)
        commit = store.save_state_and_promote_staging(
            session_id,
            state,
            step.messages,
            step.info,
            expected_version=step.expected_version,
            fencing_token=step.fencing_token,
            operation_id=step.operation_id,
            run_id=step.run_id,
        )
        return commit, state.custom_state

    def _has_no(self, argument: str, part: str) -> InvalidPayload:
        reason = f"a {type(self.sessions).__name__} has no {part} of its kind; give the call a {part}"
        return InvalidPayload(path=argument, reason=reason)
