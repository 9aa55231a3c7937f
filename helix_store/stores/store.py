"""The public stores, and the handles that they return."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import cached_property, partial
from types import TracebackType
from typing import Any, Concatenate, Final, NoReturn, ParamSpec, Self, TypeVar

from django.db import transaction

from helix_store import conf
from helix_store.budgets import Amounts, DatabaseBudgetStore, InMemoryBudgetStore
from helix_store.core import validation
from helix_store.core.approvals import ApprovedCall
from helix_store.core.contracts import LockManager, UsageStore, takes_session_filters
from helix_store.core.effects import Reconcile
from helix_store.core.limits import Limits
from helix_store.core.types import Duration, Run, SessionPage, SessionState, StagedChanges
from helix_store.core.usage import Dollars
from helix_store.core.validation import Guard
from helix_store.engine.async_twins import (
    BothContexts,
    async_twin,
    begin_in_djangos_thread,
    in_djangos_thread_to_the_end,
    is_in_djangos_thread,
)
from helix_store.engine.database import Call, Database, WriteInDatabase
from helix_store.engine.memory import MemoryTransaction, MemoryWorld
from helix_store.engine.tasks import TaskBlock, join_block, leave_block, opened_by_task
from helix_store.engine.threads import release
from helix_store.exceptions import ConflictError, NotSupportedOnBackend, OutsideTransaction
from helix_store.items import ITEMS_AGENT_TYPE, ItemLog
from helix_store.locks import DatabaseLockManager, InMemoryLockManager
from helix_store.sessions.calls import (
    Backend,
    add_checked_calls,
    approved_call,
    open_claims,
    require_permissions,
    stage,
    start_run,
    update_run,
)
from helix_store.sessions.checkpoints import DatabaseCheckpoints
from helix_store.sessions.effects import DatabaseEffects, End, Entered, Intent
from helix_store.sessions.heads import DatabaseSessions
from helix_store.sessions.locking import lock_session
from helix_store.sessions.memory import (
    MemoryCheckpoints,
    MemoryEffects,
    MemoryMessages,
    MemoryPosts,
    MemoryRuns,
    MemorySessions,
    MemorySteps,
    MemoryWaiting,
)
from helix_store.sessions.messages import DatabaseMessages, DatabasePosts
from helix_store.sessions.records import TenantScope
from helix_store.sessions.runs import DatabaseRuns
from helix_store.sessions.steps import (
    CommittedStep,
    DatabaseSteps,
    OpenedStep,
    StagedRow,
    StepWrite,
    TurnEntry,
)
from helix_store.sessions.store import StateStoreBase
from helix_store.sessions.waiting import DatabaseWaiting
from helix_store.signals import announce, effect_unknown, session_waiting
from helix_store.stores.conditions import MemoryConditions, StuckSession, find_stuck
from helix_store.stores.effect import OpenEffect
from helix_store.stores.session import HasStoreSet, SessionHandleBase, StoreSet
from helix_store.stores.step import Step
from helix_store.stores.turn import Turn
from helix_store.streams.manager import DatabaseStreamManager, InMemoryStreamManager
from helix_store.usage.store import DatabaseUsageStore, InMemoryUsageStore

P = ParamSpec("P")
R = TypeVar("R")


class SessionHandle(SessionHandleBase):
    """One session of a store. A handle sends no query before its first call, and never reads ahead.

    Every write carries ``fencing_token``. The store is any `StateStore`, from this package or a third party;
    the handle makes only its public calls.

    Example::

        session = store.session("trip")
        session.say({"role": "user", "content": "By train, please."})
        print(session.load().status, len(session.messages()))
    """

    def step(
        self, step_id: str | None = None, *, run_id: str | None = None, operation_id: str | None = None
    ) -> Step:
        """Return an atomic step for ``with`` or ``async with``. Its default id is ``step-<number>``."""
        if run_id is not None:
            validation.identifier(run_id, "run_id")
        return Step(self, step_id, run_id=run_id, operation_id=operation_id)

    def turn(
        self,
        *,
        locks: LockManager | None = None,
        owner: str | None = None,
        ttl: Duration | None = None,
        usage: UsageStore | None = None,
        receive: bool = True,
        rest: bool = True,
        estimate_usd: Dollars | None = None,
        estimate_tokens: int | None = None,
    ) -> Turn:
        """Return a turn for ``with`` or ``async with``: one worker drives the session until it ends or waits.

        By default, ``locks`` and ``usage`` belong to the same database and tenant. ``ttl`` is a duration or
        milliseconds. Entering raises `SessionBusy` while another worker drives the session. Entering the turn
        and each commit receive due posts, unless ``receive`` is false. A session is at rest if its last turn
        ended with `end_turn` and nothing has arrived since: the turn is then not active, unless ``rest`` is
        false. The estimates are reserved for each step in the budgets that apply to the session.
        """
        return Turn(
            self,
            locks=locks,
            owner=owner,
            ttl=ttl,
            usage=usage,
            receive=receive,
            rest=rest,
            estimate_usd=estimate_usd,
            estimate_tokens=estimate_tokens,
        )

    def effect(
        self,
        effect_id: str,
        *,
        tool_name: str = "",
        input: Any = None,
        approval: bool = False,
        retry: bool = False,
        reconcile: Reconcile | None = None,
    ) -> OpenEffect:
        """Return an effect as `Turn.effect` does, for a loop without a turn.

        It is guarded by the handle's fencing token. Without a token, nothing shows whether a worker that has
        started it is still there, so every later entry finds an effect of which nobody knows the outcome.
        """
        return OpenEffect(
            self,
            effect_id,
            tool_name=tool_name,
            input=input,
            approval=approval,
            retry=retry,
            reconcile=reconcile,
        )


def _as_handle(
    create: Callable[Concatenate[StateStoreBase, P], SessionState],
) -> Callable[Concatenate[OpensSessions, P], SessionHandle]:
    @functools.wraps(create)
    def new_session(self: OpensSessions, /, *args: P.args, **kwargs: P.kwargs) -> SessionHandle:
        state: SessionState = getattr(self._stores.sessions, create.__name__)(*args, **kwargs)
        return self.session(state.session_id)

    new_session.__name__ = "new_session"
    new_session.__qualname__ = "OpensSessions.new_session"
    new_session.__doc__ = "Create a session as `create_session` does, and return a handle on it."
    return new_session


class OpensSessions(HasStoreSet):
    """A store that opens handles."""

    def session(self, session_id: str, *, fencing_token: int | None = None) -> SessionHandle:
        """Return a handle on a session whose writes carry the token. Sends no query and accepts any id."""
        return SessionHandle(self, session_id, fencing_token)

    new_session = _as_handle(StateStoreBase.create_session)

    anew_session = async_twin(new_session)


class StoreBase(StoreSet, OpensSessions):
    """The stores of one database and tenant, and the most common calls."""

    sessions: DatabaseStateStore | InMemoryStateStore

    @classmethod
    def _around(cls, sessions: DatabaseStateStore | InMemoryStateStore) -> Self:
        store = cls.__new__(cls)
        store.sessions = sessions
        return store

    @property
    def _stores(self) -> Self:
        return self

    @property
    def tenant(self) -> str:
        return self.sessions.tenant

    @property
    def limits(self) -> Limits:
        return conf.limits(self.sessions._own_limits)

    @takes_session_filters
    def list_sessions(self, **filters: Any) -> SessionPage:
        """List a page of session heads, as `StateStore.list_sessions` does."""
        return self.sessions.list_sessions(**filters)

    alist_sessions = async_twin(list_sessions)

    def commit_step(self, step: StepWrite) -> CommittedStep:
        committed = self._committed(step)
        if step.opened and not step.is_earlier(committed[0]):
            root_id = step.state.root_session_id or step.session_id
            self._announce_waiting(step.session_id, root_id, list(step.opened))
        return committed

    def _committed(self, step: StepWrite) -> CommittedStep:
        return step.written_by(self._commit)

    def _commit(self, step: StepWrite) -> CommittedStep:
        """Commit a step without the calls that belong to it.

        A handle passes the changes that it staged and the approvals that it uses, which it has read at the
        expected version. Raises `ConflictError` if any of these changes no longer exists.
        """
        steps = self.sessions._operations.steps
        limits, keep = conf.rules_of_step(self.sessions._own_limits)
        return step.committed_by(steps.commit, limits, keep=keep)

    def _announce_waiting(self, session_id: str, root_session_id: str, opened: list[str]) -> None:
        """Send the signal that a step has opened calls, after the commit."""
        raise NotImplementedError

    def enter(self, session_id: str) -> TurnEntry | None:
        return self.sessions._operations.steps.enter(session_id)

    def start_run(
        self, session_id: str, *, keeps_status: bool = False, **guard: Any
    ) -> tuple[Run, str | None]:
        return start_run(self.sessions._operations, session_id, keeps_status=keeps_status, **guard)

    def end_run(self, session_id: str, run_id: str, *, refused: Amounts | None, **update: Any) -> None:
        update_run(
            self.sessions._operations,
            self.sessions._own_limits,
            session_id,
            run_id,
            refused=refused,
            **update,
        )

    def require_permissions(self, entries: Mapping[str, dict[str, Any]]) -> None:
        require_permissions(self.sessions._operations, entries)

    def record_calls(self, session_id: str, entries: dict[str, Any], fencing_token: int | None) -> None:
        add_checked_calls(self.sessions._operations, session_id, entries, fencing_token)

    def approved_call(self, session_id: str, tool_call_id: str) -> tuple[int, int, ApprovedCall]:
        return approved_call(self.sessions._operations, session_id, tool_call_id)

    def open_claims(self, state: SessionState) -> Collection[str]:
        return open_claims(self.sessions, state)

    def enter_effect(self, session_id: str, intent: Intent, fencing_token: int | None) -> Entered:
        return self.sessions._operations.effects.enter(session_id, intent, Guard(None, fencing_token))

    def end_effect(self, session_id: str, end: End, fencing_token: int | None) -> None:
        self.sessions._operations.effects.end(session_id, end, Guard(None, fencing_token))

    @property
    def _identity(self) -> tuple[object, str]:
        """The values that equal stores share: the database and the tenant."""
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        return self._identity == other._identity if isinstance(other, StoreBase) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._identity)


_SEVERAL_THREADS: Final = (
    "The calls of this block would be made in several threads, which share no transaction; use `with` in a "
    "synchronous function, and call the function with sync_to_async."
)


class StoreTransaction(BothContexts):
    """One transaction over all parts of a store. It can only be used once.

    In an ``async with`` block, the calls of the task that has entered it are part of the transaction, and so
    are those of the tasks that it creates inside of the block.
    """

    def __init__(self, begin: Callable[[TaskBlock | None], AbstractContextManager[object]]) -> None:
        self._begin = begin
        self._is_used = False
        self._block: AbstractContextManager[object] | None = None
        self._task_block: TaskBlock | None = None

    def __enter__(self) -> Self:
        self._require_unused()
        self._is_used = True
        block = self._begin(self._task_block)
        block.__enter__()
        self._block = block
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._block is None:
            return False
        block, self._block = self._block, None
        if error is None and self._task_block is not None:
            try:
                self._task_block.check_thread()
            except OutsideTransaction as refusal:
                block.__exit__(type(refusal), refusal, refusal.__traceback__)
                raise
        return bool(block.__exit__(kind, error, trace))

    async def __aenter__(self) -> Self:
        self._require_unused()
        if not is_in_djangos_thread():
            raise OutsideTransaction(_SEVERAL_THREADS)
        self._task_block = TaskBlock(self._roll_back)
        join_block(self._task_block)
        try:
            entered = await super().__aenter__()
            self._task_block.note()
            return entered
        except BaseException:
            leave_block(self._task_block)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._task_block is None:
            return False
        try:
            is_handled = await super().__aexit__(kind, error, trace)
            if error is None:
                self._task_block.check_end()
            return is_handled
        finally:
            leave_block(self._task_block)

    async def _begin_in_thread(self, enter: Callable[[], R]) -> R:
        return await begin_in_djangos_thread(enter)

    async def _end_in_thread(self, leave: Callable[[], bool]) -> bool:
        # A transaction that has begun in this thread can only end in it, also after a cancellation.
        return await in_djangos_thread_to_the_end(leave)

    def _require_unused(self) -> None:
        if self._is_used:
            raise ConflictError("A transaction is used once; begin another one with transaction().")

    def _roll_back(self, error: OutsideTransaction) -> None:
        self.__exit__(type(error), error, None)


class DatabaseStateStore(OpensSessions, StateStoreBase):
    """Durable agent sessions in a Django database.

    ``using`` is a database alias, by default the one that the project's routers return for writing sessions.
    Ids are unique within ``tenant``, and other tenants' ids are invisible. Each write is one transaction that
    joins the caller's own ``atomic()`` block, so a step and the caller's rows commit together.
    Source: the state store of `@helix-agents/store-postgres`.

    Example::

        sessions = DatabaseStateStore(tenant="acme")
        sessions.create_session("order", agent_type="support", user_id="ada")
        sessions.append_messages("order", [{"role": "user", "content": "Where is my order?"}])
    """

    def __init__(self, using: str | None = None, *, tenant: str = "", limits: Limits | None = None) -> None:
        conf.require_usable_prefix()
        db = Database(using, validation.tenant(tenant), limits)
        steps = DatabaseSteps(db)
        backend = Backend(
            sessions=DatabaseSessions(db),
            messages=DatabaseMessages(db),
            steps=steps,
            checkpoints=DatabaseCheckpoints(db),
            runs=DatabaseRuns(db),
            waiting=DatabaseWaiting(db),
            posts=DatabasePosts(db),
            effects=DatabaseEffects(db),
        )
        super().__init__(backend, tenant=db.tenant, limits=limits)
        self._operations, self._own_limits = backend, limits
        self._db = db
        self._steps = steps

    @property
    def alias(self) -> str:
        """The database that the store works on."""
        return self._db.alias

    @property
    def _stores(self) -> Store:
        return Store._around(self)


class Store(StoreBase):
    """All stores for one database and tenant.

    ``using`` is a database alias, by default the one that the project's routers return for writing sessions.
    A store is cheap to create and holds no connection. Stores of the same database and tenant are equal.

    Example::

        store = Store()
        session = store.new_session("order", agent_type="support", user_id="ada")
        with session.turn() as turn, turn.step() as step:
            step.say({"role": "assistant", "content": "Your order arrives tomorrow."})
    """

    sessions: DatabaseStateStore

    def __init__(self, using: str | None = None, *, tenant: str = "") -> None:
        self.sessions = DatabaseStateStore(using, tenant=tenant)

    @property
    def alias(self) -> str:
        """The database that the store works on."""
        return self.sessions.alias

    @cached_property
    def locks(self) -> DatabaseLockManager:
        """The lock manager."""
        return DatabaseLockManager(self.alias, tenant=self.tenant)

    @cached_property
    def usage(self) -> DatabaseUsageStore:
        """The usage store."""
        return DatabaseUsageStore(self.alias, tenant=self.tenant)

    @cached_property
    def budgets(self) -> DatabaseBudgetStore:
        """The budget store."""
        return DatabaseBudgetStore(self.alias, tenant=self.tenant)

    @cached_property
    def streams(self) -> DatabaseStreamManager:
        """The stream manager."""
        return DatabaseStreamManager(self.alias, tenant=self.tenant)

    def items(self, session_id: str, lane: str = "", *, agent_type: str = ITEMS_AGENT_TYPE) -> ItemLog:
        """Return the items of one lane of a session. Sends no query."""
        return ItemLog(session_id, lane, using=self.alias, tenant=self.tenant, agent_type=agent_type)

    def find_stuck(
        self,
        *,
        conditions: Collection[str] | None = None,
        older_than: timedelta = timedelta(0),
        limit: int = 200,
    ) -> list[StuckSession]:
        """Return the sessions of the tenant that cannot go on, as `helix_store.find_stuck` does."""
        return find_stuck(
            using=self.alias, tenant=self.tenant, conditions=conditions, older_than=older_than, limit=limit
        )

    afind_stuck = async_twin(find_stuck)

    def transaction(self) -> StoreTransaction:
        """Run all calls of a ``with`` or ``async with`` block in one transaction, which commits at its end.

        An exception rolls the transaction back and propagates. The block is an ``atomic()`` block: it
        includes your own rows in the same database, and inside another block it is a savepoint.

        Calls of other tasks are not part of an ``async with`` block, unless the tasks were created inside of
        it. In its thread, synchronous ones raise `OutsideTransaction`, and asynchronous ones use another
        connection or wait for the end of the block: entering another one does. After 30 seconds, they raise
        `StoreBusy`. If ``ASYNC_THREADS`` is set, entering the block raises `OutsideTransaction`.
        """
        return StoreTransaction(self._block)

    @contextmanager
    def _block(self, task_block: TaskBlock | None) -> Iterator[None]:
        connection = self.sessions._db.connection
        try:
            with (
                transaction.atomic(using=self.alias)
                if task_block is None
                else opened_by_task(task_block, connection)
            ):
                yield
        finally:
            release(connection)

    @property
    def in_callers_transaction(self) -> bool:
        return self.sessions._db.in_transaction

    def uncommitted_write(self) -> WriteInDatabase | None:
        db = self.sessions._db
        return WriteInDatabase(db.connection) if db.in_transaction else None

    def announce_unknown(self, session_id: str, effect_id: str) -> None:
        announce(self.sessions._db, session_id, [effect_unknown], effect_id=effect_id)

    def load(self, session_id: str) -> SessionState | None:
        return self.sessions._operations.sessions.load(session_id)

    def open_step(
        self, session_id: str, step_id: str | None, run_id: str | None, *, is_capped: bool
    ) -> OpenedStep | None:
        return self.sessions._steps.open_step(session_id, step_id, run_id, is_capped=is_capped)

    def stage(self, session_id: str, step_id: str, changes: StagedChanges) -> StagedRow | None:
        return stage(self.sessions._operations, self.sessions._own_limits, session_id, step_id, changes)

    def _announce_waiting(self, session_id: str, root_session_id: str, opened: list[str]) -> None:
        announce(
            self.sessions._db,
            session_id,
            [session_waiting],
            tool_call_ids=opened,
            root_session_id=root_session_id,
        )

    def _committed(self, step: StepWrite) -> CommittedStep:
        """Commit a step and the calls that belong to it, in one transaction.

        If the reply to COMMIT is lost, the transaction runs again unless the database has the step.
        """
        if not (step.after or step.record):
            return self._commit(step)
        db = self.sessions._db
        committed: CommittedStep | None = None

        def write() -> CommittedStep:
            nonlocal committed
            committed = step.written_by(self._commit)
            return committed

        def write_again(call: Call) -> CommittedStep:
            lock_session(db, step.session_id)
            if committed is not None:
                checkpoint_id = committed[0].checkpoint_id
                if self.sessions.get_checkpoint(step.session_id, checkpoint_id) is not None:
                    return committed
            return write()

        return db.committed_once(
            partial(db.transaction, write),
            write_again,
            operation_id=lambda: None if committed is None else committed[0].checkpoint_id,
        )

    @property
    def _identity(self) -> tuple[object, str]:
        return self.alias, self.tenant

    def __repr__(self) -> str:
        return f"<Store {self.alias!r} tenant={self.tenant!r}>"


class InMemoryStateStore(OpensSessions, StateStoreBase):
    """Sessions in the memory of this process, as in the database store; for tests and experiments.

    Stores with the same ``world`` share their data; by default each store gets a new one.

    Example::

        sessions = InMemoryStateStore()
        sessions.create_session("order", agent_type="support")
        print(sessions.load_state("order").status)
    """

    def __init__(
        self, *, tenant: str = "", limits: Limits | None = None, world: MemoryWorld | None = None
    ) -> None:
        tenant = validation.tenant(tenant)
        self._scope = TenantScope(MemoryWorld() if world is None else world, tenant=tenant, limits=limits)
        backend = Backend(
            sessions=MemorySessions(self._scope),
            messages=MemoryMessages(self._scope),
            steps=MemorySteps(self._scope),
            checkpoints=MemoryCheckpoints(self._scope),
            runs=MemoryRuns(self._scope),
            waiting=MemoryWaiting(self._scope),
            posts=MemoryPosts(self._scope),
            effects=MemoryEffects(self._scope),
        )
        super().__init__(backend, tenant=tenant, limits=limits)
        self._operations, self._own_limits = backend, limits

    @property
    def world(self) -> MemoryWorld:
        """The in-memory database that the store works on."""
        return self._scope.world

    def clear(self) -> None:
        """Delete every session of the tenant, with its usage. Safe to repeat."""
        with self._scope.lock:
            for session_id in self.get_all_session_ids():
                self._scope.forget(session_id)

    def get_all_session_ids(self) -> list[str]:
        """List the ids of the tenant's sessions, in the order in which they were created."""
        with self._scope.lock:
            return list(self._scope.sessions)

    def get_sync(self, session_id: str) -> SessionState | None:
        """Return the current state, exactly as `load_state` does."""
        return self.load_state(session_id)

    @property
    def _stores(self) -> InMemoryStore:
        return InMemoryStore._around(self)


class InMemoryStore(StoreBase):
    """All stores for one tenant in the memory of this process; for tests and experiments.

    Stores with the same ``world`` share their data; by default each store gets a new one. Stores of the same
    world and tenant are equal.

    Example::

        store = InMemoryStore()
        session = store.new_session("order", agent_type="support")
        session.say({"role": "user", "content": "Where is my order?"})
    """

    sessions: InMemoryStateStore

    def __init__(self, *, tenant: str = "", world: MemoryWorld | None = None) -> None:
        self.sessions = InMemoryStateStore(tenant=tenant, world=world)

    @property
    def world(self) -> MemoryWorld:
        """The in-memory database that the store works on."""
        return self.sessions.world

    @cached_property
    def locks(self) -> InMemoryLockManager:
        """The lock manager."""
        return InMemoryLockManager(tenant=self.tenant, world=self.world)

    @cached_property
    def usage(self) -> InMemoryUsageStore:
        """The usage store."""
        return InMemoryUsageStore(tenant=self.tenant, world=self.world)

    @cached_property
    def budgets(self) -> InMemoryBudgetStore:
        """The budget store."""
        return InMemoryBudgetStore(tenant=self.tenant, world=self.world)

    @cached_property
    def streams(self) -> InMemoryStreamManager:
        """The stream manager."""
        return InMemoryStreamManager(tenant=self.tenant, world=self.world)

    def items(self, session_id: str, lane: str = "", *, agent_type: str = "") -> NoReturn:
        """Raise `NotSupportedOnBackend`: items need a database."""
        raise NotSupportedOnBackend("Items need a database; use Store.")

    @property
    def in_callers_transaction(self) -> bool:
        return self.world.open_transaction is not None

    def uncommitted_write(self) -> MemoryTransaction | None:
        return self.world.open_transaction

    def announce_unknown(self, session_id: str, effect_id: str) -> None:
        self.sessions._scope.announce(session_id, [effect_unknown], effect_id=effect_id)

    def find_stuck(
        self,
        *,
        conditions: Collection[str] | None = None,
        older_than: timedelta = timedelta(0),
        limit: int = 200,
    ) -> list[StuckSession]:
        """Return the sessions of the tenant that cannot go on, as `helix_store.find_stuck` does."""
        found = MemoryConditions(self.sessions._scope, tenant=self.tenant)
        return found.find(conditions, older_than, limit)

    afind_stuck = async_twin(find_stuck)

    def transaction(self) -> StoreTransaction:
        """Run all calls of a ``with`` or ``async with`` block in one transaction.

        Other threads wait until it ends, and so do asynchronous calls of other tasks, for up to 30 seconds
        (see `Store.transaction`). An exception restores the data of all stores of the world and propagates.
        Signals are sent after the outermost block; those of a block that is rolled back are discarded.
        """
        # A table is saved only if it existed before the block.
        _ = self.locks, self.usage, self.budgets, self.streams
        return StoreTransaction(self.world.transaction)

    def _announce_waiting(self, session_id: str, root_session_id: str, opened: list[str]) -> None:
        self.sessions._scope.announce_waiting(session_id, root_session_id, opened)

    @property
    def _identity(self) -> tuple[object, str]:
        return self.world, self.tenant

    def __repr__(self) -> str:
        return f"<InMemoryStore tenant={self.tenant!r}>"
