"""A third-party state store in the form that a handle uses."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import NoReturn

from helix_store import conf
from helix_store.core.contracts import StateStore, UsageStore, require_state_store
from helix_store.core.limits import Limits
from helix_store.core.manager_contracts import LockManager
from helix_store.core.merging import with_staged
from helix_store.exceptions import InvalidPayload, NotSupportedOnBackend
from helix_store.sessions.requests import CommittedStep, StepWrite, are_stored, dropped_staging
from helix_store.stores.parts import Parts


class ThirdPartyStore(Parts):
    """A state store that has only the calls of the contract.

    A process can be killed between two calls. Calls made before a step are valid or have no effect without
    it; calls made after it can be repeated from the stored data.
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
        """Promote staged changes here: the store could also promote them, but would not return them.

        If removing them succeeds, nobody else has removed them in the meantime.
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
