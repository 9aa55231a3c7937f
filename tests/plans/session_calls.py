"""What is read of one session, and what looks through many: the state store, locks and the cleanup."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Final

from helix_store import announce_due_posts, announce_ready, find_stuck, new_id
from helix_store.cleanup import expired_session_cleanup
from helix_store.contrib import metrics
from helix_store.core.types import StepInfo
from helix_store.engine.database import Database
from helix_store.models import Post, Session
from helix_store.reports.session import waiting_posts
from helix_store.sessions.locking import pk_of
from helix_store.stores.conditions import CONDITIONS, Condition, conditions_of, find_statement
from tests.plans.calls import ANALYSED, PAGE, SQLITE, Call, gap
from tests.plans.rows import BUSY, CHAT, LONG, NOW, STEPPING, World

__all__ = ["SESSION_CALLS"]

_ALL_OF_A_SESSION: Final = LONG + 100

_DELTAS: Final = "every row of the session is asked whether it is a delta from one that goes"
_EVERY_NAME: Final = "a row for every name that was ever locked, and no index of those that are held"

Make = Callable[[World], Callable[[], object]]


def _of_store(method: str, *arguments: Any, **options: Any) -> Make:
    return lambda world: partial(getattr(world.store, method), *arguments, **options)


def _of_locks(method: str, *arguments: Any, **options: Any) -> Make:
    return lambda world: partial(getattr(world.locks, method), *arguments, **options)


def _checkpoints_further_on(world: World) -> Callable[[], object]:
    page = world.store.list_checkpoints(BUSY, limit=200)
    page = world.store.list_checkpoints(BUSY, limit=200, cursor=page.next_cursor)
    return partial(world.store.list_checkpoints, BUSY, limit=PAGE, cursor=page.next_cursor)


def _of_old_checkpoint(method: str) -> Make:
    def make(world: World) -> Callable[[], object]:
        oldest = world.store.list_checkpoints(BUSY, limit=100).items[-1]
        return partial(getattr(world.store, method), BUSY, oldest.checkpoint_id)

    return make


def _all_posts(world: World) -> Callable[[], object]:
    return partial(world.store.list_posts, CHAT, states=("waiting", "received", "withdrawn"), limit=PAGE)


def _waiting_posts(world: World) -> Callable[[], object]:
    db = Database(world.database.alias, world.store.tenant, None)
    posts = Post.objects.using(db.alias).filter(session_id=pk_of(db, CHAT))
    return partial(waiting_posts, posts, limit=PAGE)


def _due_posts_of_all(world: World) -> Callable[[], object]:
    return partial(announce_due_posts, using=world.database.alias, limit=PAGE)


def _stuck(condition: str, *, of_all: bool = False) -> Make:
    def make(world: World) -> Callable[[], object]:
        tenant = None if of_all else world.store.tenant
        chosen: dict[str, Any] = {
            "conditions": [condition],
            "older_than": timedelta(seconds=1),
            "limit": PAGE,
        }
        return partial(find_stuck, using=world.database.alias, tenant=tenant, **chosen)

    return make


_IN_PAGES: Final[tuple[Condition, ...]] = ("unanswered", "waiting")


def _next_page(condition: Condition) -> Make:
    """The page after the first session, which a search reads if calls have excluded sessions."""

    def make(world: World) -> Callable[[], object]:
        db = Database(world.database.alias, world.store.tenant, None)
        (first,) = find_stuck(using=db.alias, tenant=db.tenant, conditions=[condition], limit=1)
        key = Session.objects.using(db.alias).get(tenant=db.tenant, session_id=first.session_id).pk
        page = {"tenant": db.tenant, "since": first.since, "place": key, "limit": PAGE}
        return partial(db.read, find_statement(condition, "one", is_next=True), page)

    return make


def _effect(world: World) -> Callable[[], object]:
    def make() -> None:
        with world.store.session(BUSY).effect(new_id()) as effect:
            effect.done()

    return make


def _ready(world: World) -> Callable[[], object]:
    return partial(announce_ready, using=world.database.alias, limit=PAGE)


def _counts_of_metrics(world: World) -> Callable[[], object]:
    db = Database(world.database.alias, world.store.tenant, None)
    return partial(db.read, metrics._counts(of_all=True), {"tenant": db.tenant})


def _conditions_of_page(world: World) -> Callable[[], object]:
    db = Database(world.database.alias, world.store.tenant, None)
    keys = list(Session.objects.using(db.alias).filter(tenant=db.tenant).values_list("pk", flat=True)[:PAGE])
    return partial(conditions_of, db, keys)


def _first_message(world: World) -> Callable[[], object]:
    return lambda: next(world.store.iter_messages(BUSY, chunk_size=PAGE))


def _step(*, staged: bool, **options: Any) -> Make:
    def make(world: World) -> Callable[[], object]:
        store, name = world.store, str(sorted(options))
        state = store.load_state(STEPPING)
        assert state is not None
        step = StepInfo(f"step {staged} {name}", 5)
        if staged:
            store.stage_changes(STEPPING, step.step_id, {"tool_call_id": "call"})
        message = {"role": "user", "content": "hello"}
        return partial(store.save_state_and_promote_staging, STEPPING, state, [message], step, **options)

    return make


def _held_for_a_while(world: World) -> Callable[[], object]:
    def hold() -> None:
        lock = world.locks.acquire("lock-5")
        assert lock is not None
        lock.refresh()
        lock.release()

    return hold


def _cleanup(**options: Any) -> Make:
    return lambda world: partial(
        expired_session_cleanup,
        state_store=world.store,
        workspace_providers={},
        page_size=PAGE,
        now=NOW,
        **options,
    )


SESSION_CALLS: Final = [
    # Look-ups
    Call("session_exists", _of_store("session_exists", BUSY)),
    Call("load_state", _of_store("load_state", BUSY)),
    Call("get_message_count", _of_store("get_message_count", BUSY)),
    Call("check_interrupt", _of_store("check_interrupt", BUSY)),
    Call("get_current_run", _of_store("get_current_run", BUSY)),
    Call("get_latest_checkpoint", _of_store("get_latest_checkpoint", BUSY)),
    Call("get_checkpoint", _of_old_checkpoint("get_checkpoint")),
    # Pages of one session. PostgreSQL sorts the page that it has found, because it joins the session.
    Call("get_messages, first page", _of_store("get_messages", BUSY, limit=PAGE), sorts=PAGE),
    Call("get_messages, far page", _of_store("get_messages", BUSY, limit=PAGE, offset=500), sorts=PAGE),
    Call("get_messages to the end", _of_store("get_messages", BUSY, offset=LONG - 20), sorts=PAGE),
    Call("get_messages, newest", _of_store("get_messages", BUSY, limit=PAGE, order="desc"), sorts=PAGE),
    Call(
        "get_messages, far back",
        _of_store("get_messages", BUSY, limit=PAGE, offset=500, order="desc"),
        sorts=PAGE,
    ),
    Call("iter_messages", _first_message, sorts=PAGE),
    # The total is counted, which reads the index of all checkpoints.
    Call("list_checkpoints", _of_store("list_checkpoints", BUSY, limit=PAGE), reads=_ALL_OF_A_SESSION),
    Call("list_checkpoints, far page", _checkpoints_further_on, reads=_ALL_OF_A_SESSION),
    Call("list_runs", _of_store("list_runs", BUSY, limit=PAGE)),
    Call("list_runs by offset", _of_store("list_runs", BUSY, limit=PAGE, offset=100)),
    # All of them, in the order in which they were added: a session has few.
    Call("get_sub_session_refs", _of_store("get_sub_session_refs", BUSY), sorts=PAGE),
    Call("get_staged_changes", _of_store("get_staged_changes", BUSY, "step-7"), sorts=PAGE),
    # Writes that look for more than one row
    Call("a step", _step(staged=False), commits=True),
    Call("a step with staged changes", _step(staged=True), sorts=PAGE, commits=True),
    Call("a step as an operation", _step(staged=False, operation_id="operation"), commits=True),
    Call("update_run", _of_store("update_run", BUSY, "run-500", status="completed")),
    Call("promote_staging", _of_store("promote_staging", BUSY, "step-7")),
    Call("discard_staging", _of_store("discard_staging", BUSY, "step-7")),
    Call("clear_interrupt", _of_store("clear_interrupt", BUSY)),
    Call("delete_checkpoint", _of_old_checkpoint("delete_checkpoint"), gaps=gap(_DELTAS)),
    # Every checkpoint of the session, for those that are beyond the cut.
    Call(
        "truncate_messages",
        _of_store("truncate_messages", BUSY, LONG - 20),
        reads=_ALL_OF_A_SESSION,
        gaps=gap(_DELTAS),
    ),
    # Whatever was staged goes.
    Call("restore_checkpoint", _of_old_checkpoint("restore_checkpoint"), reads=_ALL_OF_A_SESSION),
    # Back from the newest checkpoint to the one at the message, and every item is asked for its time.
    Call(
        "branch_session at a message",
        _of_store("branch_session", BUSY, message_index=20),
        reads=_ALL_OF_A_SESSION + 2 * LONG,
        sorts=_ALL_OF_A_SESSION,
    ),
    # Over those that are kept, and over all of the session's rows for the deltas from those that go.
    Call("prune_checkpoints", _of_store("prune_checkpoints", BUSY, keep=LONG - 20), reads=4 * LONG),
    # Posts. The maximum is counted, and one by another id than the time is looked for in those that wait.
    Call(
        "post_message",
        _of_store("post_message", CHAT, {"role": "user"}, key="new"),
        reads=_ALL_OF_A_SESSION,
    ),
    Call("list_posts", _of_store("list_posts", CHAT, limit=PAGE), reads=_ALL_OF_A_SESSION, sorts=LONG),
    Call("list_posts of all states", _all_posts, reads=_ALL_OF_A_SESSION, sorts=_ALL_OF_A_SESSION),
    Call("waiting posts of a report", _waiting_posts, reads=_ALL_OF_A_SESSION),
    Call("withdraw_post", _of_store("withdraw_post", CHAT, "post-600"), reads=_ALL_OF_A_SESSION),
    Call("receive_posts", _of_store("receive_posts", CHAT, limit=PAGE), sorts=PAGE),
    # Every decision of the session is asked whether it is about its call.
    Call("an effect", _effect, reads=_ALL_OF_A_SESSION, commits=True),
    # Sweeps
    # The due posts of a session are counted.
    Call("find_due_posts", _of_store("find_due_posts", limit=PAGE), reads=_ALL_OF_A_SESSION),
    # All of them are sorted, so that they take turns.
    Call(
        "announce_due_posts of all tenants",
        _due_posts_of_all,
        reads=3 * _ALL_OF_A_SESSION,
        sorts=_ALL_OF_A_SESSION,
    ),
    # PostgreSQL sorts the sessions of a partial index if they are few, instead of reading them in its order.
    *(
        Call(
            f"find_stuck{name}, {condition}",
            _stuck(condition, of_all=of_all),
            reads=_ALL_OF_A_SESSION,
            sorts=4 * PAGE,
        )
        for name, of_all in (("", False), (" of all tenants", True))
        for condition in CONDITIONS
    ),
    *(
        Call(
            f"find_stuck, next page of {condition}",
            _next_page(condition),
            reads=_ALL_OF_A_SESSION,
            sorts=4 * PAGE,
        )
        for condition in _IN_PAGES
    ),
    # Every session that is ready is read and sorted, so that they take turns.
    Call("announce_ready", _ready, reads=_ALL_OF_A_SESSION, sorts=_ALL_OF_A_SESSION),
    Call("conditions of a page", _conditions_of_page, sorts=4 * PAGE),
    # The newest 10,000 locks are read, and up to 1,000 rows of each of the others.
    Call(
        "counts of metrics",
        _counts_of_metrics,
        reads=25_000,
        sorts=20 * PAGE,
        gaps=gap("what it scans are its own subqueries, each up to its limit", (SQLITE, ANALYSED)),
    ),
    Call(
        "find_expired_pending",
        _of_store("find_expired_pending", limit=PAGE),
    ),
    # With the sub-agents that it names.
    Call(
        "delete_session",
        _of_store("delete_session", "session-301"),
        sorts=PAGE,
    ),
    Call("cleanup, dry", _cleanup(dry_run=True, limit=PAGE)),
    Call(
        "cleanup with deletion",
        _cleanup(limit=1, delete_after=timedelta(minutes=495)),
        reads=500,
        sorts=PAGE,
    ),
    # Locks
    Call("acquire of a new lock", _of_locks("acquire", "lock-new")),
    Call("acquire of a held lock", _of_locks("acquire", "lock-1000")),
    Call("acquire, refresh and release", _held_for_a_while, commits=True),
    Call("force_release", _of_locks("force_release", "lock-1000")),
    Call("is_locked", _of_locks("is_locked", "lock-3")),
    Call("get_active_locks", _of_locks("get_active_locks"), sorts=2 * PAGE, gaps=gap(_EVERY_NAME)),
]
