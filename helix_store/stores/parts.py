"""The stores of one database and tenant that a handle needs."""

from __future__ import annotations

from django.db.backends.base.base import BaseDatabaseWrapper

from helix_store.budgets.store import BudgetStoreBase
from helix_store.core.approvals import ApprovedCall
from helix_store.core.contracts import StateStore, UsageStore
from helix_store.core.limits import Limits
from helix_store.core.manager_contracts import LockManager
from helix_store.core.types import SessionState, StagedChanges
from helix_store.sessions.requests import (
    CommittedStep,
    OpenedStep,
    StagedRow,
    StepWrite,
    default_step_id,
)


class Parts:
    """The stores of one database and tenant, and their common transaction."""

    is_atomic = True
    """True if several calls can be one transaction, or if all are lost when the process ends."""

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
        """The connection with the caller's transaction that the writes are part of, if there is one.

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
        """Commit a step and the calls that belong to it, in one transaction if the store has transactions.

        Raises `ConflictError` if any change that the step staged is gone.
        """
        raise NotImplementedError


class HasParts:
    """A store that belongs to the stores of its database and tenant."""

    @property
    def _parts(self) -> Parts:
        """The stores of the same database and tenant."""
        raise NotImplementedError
