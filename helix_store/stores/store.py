"""The common base of `Store` and `InMemoryStore`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

from helix_store import conf
from helix_store.core.approvals import ApprovedCall
from helix_store.core.limits import Limits
from helix_store.core.signatures import takes_session_filters
from helix_store.core.types import SessionPage
from helix_store.engine.async_twins import BothContexts, async_twin
from helix_store.exceptions import ConflictError, OutsideTransaction
from helix_store.sessions.requests import CommittedStep, StepWrite
from helix_store.sessions.store import StateStoreBase
from helix_store.stores.handle import OpensSessions
from helix_store.stores.parts import Parts


class StoreBase(Parts, OpensSessions):
    """The stores of one database and tenant, and the most common calls."""

    sessions: StateStoreBase

    @classmethod
    def _around(cls, sessions: StateStoreBase) -> Self:
        store = cls.__new__(cls)
        store.sessions = sessions
        return store

    @property
    def _parts(self) -> Self:
        return self

    @property
    def tenant(self) -> str:
        return self.sessions.tenant

    @property
    def limits(self) -> Limits:
        return self.sessions.limits

    @takes_session_filters
    def list_sessions(self, **filters: Any) -> SessionPage:
        """List a page of session heads, as `StateStore.list_sessions` does."""
        return self.sessions.list_sessions(**filters)

    alist_sessions = async_twin(list_sessions)

    def commit_step(self, step: StepWrite) -> CommittedStep:
        return step.written_by(self.sessions._commit_step)

    def approved_call(self, session_id: str, tool_call_id: str) -> tuple[int, ApprovedCall]:
        return self.sessions._approved_call(session_id, tool_call_id)

    @property
    def _identity(self) -> tuple[object, str]:
        """The values that equal stores share: the database and the tenant."""
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        return self._identity == other._identity if isinstance(other, StoreBase) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._identity)


class StoreTransaction(BothContexts):
    """One transaction over all parts of a store. It can only be used once."""

    def __init__(self, block: AbstractContextManager[object]) -> None:
        self._block = block
        self._is_used = self._is_open = False

    def __enter__(self) -> Self:
        if self._is_used:
            raise ConflictError("A transaction is used once; begin another one with transaction().")
        self._is_used = True
        self._block.__enter__()
        self._is_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not self._is_open:
            return False
        self._is_open = False
        return bool(self._block.__exit__(kind, error, trace))

    async def __aenter__(self) -> Self:
        if conf.async_threads():
            # The calls in the block would run in other threads, outside the transaction.
            raise OutsideTransaction
        return await super().__aenter__()
