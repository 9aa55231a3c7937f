"""What an interface shows about a session and its budgets."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from decimal import Decimal
from typing import Any, Final, Literal, NamedTuple, TypeVar

from django.db.models import Model, QuerySet

from helix_store.budgets import (
    BALANCES_OF_ROWS,
    BALANCES_OF_VALUES,
    Balance,
    DatabaseBudgets,
    balance_of,
    status_of,
)
from helix_store.catalogue import ConversationPage
from helix_store.core.effects import Effect
from helix_store.core.ids import parse_checkpoint_id
from helix_store.core.payloads import Serializable
from helix_store.core.transcript import ConversationMessage
from helix_store.core.types import CheckpointPage, InterruptRequest, Message, Run, SessionState, SubSessionRef
from helix_store.core.usage import BudgetPeriod, BudgetScope, BudgetStatus, UsageRollup, rounded_cost
from helix_store.counters import Spender, keys_of
from helix_store.engine.database import Database
from helix_store.engine.expressions import list_parameter, tenant_parameter
from helix_store.exceptions import IntegrityFault, InvalidPayload, SessionNotFound
from helix_store.models import Budget, Decision, Post
from helix_store.models import Message as MessageRow
from helix_store.models.sessions import PostState
from helix_store.reports.conversations import (
    conversations_of,
    messages_of,
    own_messages,
    said_at_start,
    threads_of,
    unread_rows,
)
from helix_store.reports.payloads import payload_start
from helix_store.sessions.locking import pk_of, session_with_id
from helix_store.sessions.state import step_checkpoints
from helix_store.stores import DatabaseStateStore, DatabaseUsageStore
from helix_store.stores.conditions import StuckSession, conditions_of
from helix_store.stores.directory import SessionDirectory, TreeNode
from helix_store.usage.store import unpriced_entries

_COLUMNS: Final = 12
"""The columns of `balance_of`, followed by those of a statement itself."""
_STOPPED: Final = "budget:"
_BUDGETS_AT_ONCE: Final = 500
_POSITION: Final = re.compile(
    r"(?P<session_id>.+)@(?:latest(?:~(?P<before>[0-9]{1,6}))?|(?P<current>current)"
    r"|step-(?P<step>[0-9]{1,15}))",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitReport:
    """One limit of a budget, in dollars or in tokens."""

    unit: Literal["usd", "tokens"]
    limit: Decimal | int
    spent: Decimal | int
    held: Decimal | int
    remaining: Decimal | int

    @property
    def is_reached(self) -> bool:
        return not self.remaining

    def amount(self, value: Decimal | int) -> str:
        """Return an amount as text, without the name of the unit."""
        return f"${rounded_cost(value)}" if isinstance(value, Decimal) else f"{value:,}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetReport:
    """A budget with one of its counters. For a budget per value, the counter may be the highest one.

    ``value_count`` is then the number of values with a current counter, at most one more than
    `MOST_COUNTERS`, and ``status`` is the highest of at most `MOST_COUNTERS` counters.
    """

    tenant: str
    scope: BudgetScope
    period: BudgetPeriod
    is_for_each: bool
    value_count: int | None
    status: BudgetStatus

    @property
    def limits(self) -> list[LimitReport]:
        status = self.status
        amounts: dict[Literal["usd", "tokens"], Sequence[Any]] = {
            "usd": (status.limit_usd, status.spent_usd, status.held_usd, status.remaining_usd),
            "tokens": (status.limit_tokens, status.spent_tokens, status.held_tokens, status.remaining_tokens),
        }
        return [
            LimitReport(unit=unit, limit=limit, spent=spent, held=held, remaining=remaining)
            for unit, (limit, spent, held, remaining) in amounts.items()
            if limit is not None and remaining is not None
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, with exact dollars as text."""
        return {
            "tenant": self.tenant,
            "scope": self.scope.value,
            "period": self.period.value,
            "is_for_each": self.is_for_each,
            "value_count": self.value_count,
            **self.status.to_dict(),
        }


def reports_of_session(db: Database, spender: Spender) -> list[BudgetReport]:
    """Return every budget that applies to a session of the database's tenant, by name. One statement."""
    balances = DatabaseBudgets(db).balances(keys_of(spender))
    return [_report(db.tenant, balance) for balance in balances]


def reports_of_budgets(rows: Sequence[Budget], *, using: str) -> dict[int, BudgetReport]:
    """Return the report of each budget by its key, except for budgets that cannot be read. One statement."""
    if not rows:
        return {}
    db, tenants = Database(using, ""), {row.pk: row.tenant for row in rows}
    reports = {}
    for row in db.read(BALANCES_OF_ROWS, {"keys": list_parameter(db, list(tenants))}):
        key, value_count = row[_COLUMNS:]
        with suppress(IntegrityFault):
            reports[key] = _report(tenants[key], balance_of(row)[0], value_count)
    return reports


def all_reports(*, using: str, tenant: str | None) -> Iterator[BudgetReport]:
    """Yield the reports of all budgets, or those of one tenant, by tenant and name.

    One statement for 500 budgets, after one that reads them all. Budgets that cannot be read are left out.
    """
    rows = Budget.objects.using(using).order_by("tenant", "name")
    budgets = list(rows if tenant is None else rows.filter(tenant=tenant_parameter(tenant)))
    for start in range(0, len(budgets), _BUDGETS_AT_ONCE):
        batch = budgets[start : start + _BUDGETS_AT_ONCE]
        reports = reports_of_budgets(batch, using=using)
        yield from (reports[budget.pk] for budget in batch if budget.pk in reports)


def reports_of_values(budget: Budget, *, using: str, first: int, limit: int) -> list[BudgetReport]:
    """Return a page of the values of a budget that applies to each value, highest first. One statement.

    An index finds the values of the current period, which are then sorted, because each step would have to
    write to an index on the amounts spent.
    """
    parameters = {"key": budget.pk, "limit": limit, "offset": first}
    rows = Database(using, "").read(BALANCES_OF_VALUES, parameters)
    return [_report(budget.tenant, balance_of(row)[0]) for row in rows]


def budget_that_stopped(completion_reason: str | None) -> str | None:
    """Return the name of the budget that ended a run, from the run's completion reason."""
    if completion_reason is None or not completion_reason.startswith(_STOPPED):
        return None
    return completion_reason.removeprefix(_STOPPED)


def _report(tenant: str, balance: Balance, value_count: int | None = None) -> BudgetReport:
    return BudgetReport(
        tenant=tenant,
        scope=balance.definition.scope,
        period=balance.definition.period,
        is_for_each=balance.definition.is_for_each,
        value_count=value_count,
        status=status_of(balance),
    )


T = TypeVar("T")

_PARTS: Final = (
    *("state", "interrupt", "runs", "sub_sessions", "waiting_posts", "checkpoints", "usage"),
    *("budgets", "decisions", "open_effects", "stuck"),
)


_OPEN_EFFECTS: Final = ("unknown", "started")


@dataclass(slots=True, kw_only=True)
class SessionReport:
    """The parts of a session. An unreadable part is ``None``; see ``problems``. Messages include their
    sequence.

    ``conversations`` holds the conversations that adapters keep with the session, by the name of the
    framework. If the session has neither messages nor conversations, ``unread_rows`` counts its rows in other
    tables, by their names. ``unpriced`` counts the token entries without a cost, which the sum of ``usage``
    does not include.
    """

    tenant: str
    session_id: str
    state: SessionState | None = None
    interrupt: InterruptRequest | None = None
    runs: list[Run] | None = None
    sub_sessions: list[SubSessionRef] | None = None
    waiting_posts: WaitingPosts | None = None
    checkpoints: CheckpointPage | None = None
    usage: UsageRollup | None = None
    unpriced: int | None = None
    budgets: list[BudgetReport] | None = None
    decisions: list[ShownDecision] | None = None
    open_effects: list[Effect] | None = None
    stuck: StuckSession | None = None
    messages: list[tuple[int, Message]] | None = None
    conversations: dict[str, ConversationPage] = field(default_factory=dict)
    unread_rows: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        numbered = self.messages or ()
        messages = [{"sequence": number, "message": message} for number, message in numbered]
        return {
            "tenant": self.tenant,
            "session_id": self.session_id,
            **{name: _plain(getattr(self, name)) for name in _PARTS},
            "messages": None if self.messages is None else messages,
            "conversations": {name: _plain_page(page) for name, page in self.conversations.items()},
            "unread_rows": self.unread_rows,
            "problems": self.problems,
        }


def _plain(part: Any) -> Any:
    if isinstance(part, list):
        return [each.to_dict() for each in part]
    return None if part is None else part.to_dict()


def _plain_page(page: ConversationPage) -> dict[str, Any]:
    return {
        "total": page.total,
        "thread": page.thread,
        "threads": list(page.threads),
        "thread_count": page.thread_count or len(page.threads),
        "messages": [_plain_message(each) for each in page.messages],
        "path": [
            {
                "step_id": each.step_id,
                "name": each.name,
                "step": each.step,
                "message_count": each.count,
                "created_at": each.at and each.at.isoformat(),
            }
            for each in page.path
        ],
    }


def _plain_message(message: ConversationMessage) -> dict[str, Any]:
    return {
        "number": message.number,
        "role": message.role,
        "created_at": message.at and message.at.isoformat(),
        "step": message.step,
        "is_cut": message.is_cut,
        # The content of files is in the stored message.
        "parts": None
        if message.parts is None
        else [
            {name: value for name, value in asdict(part).items() if name != "data"} for part in message.parts
        ],
        "stored": message.stored,
    }


def whole_messages(
    store: DatabaseStateStore, report: SessionReport, newest: int | None = None
) -> Iterator[tuple[str, ConversationPage | None, Iterator[ConversationMessage]]]:
    """Yield the name, the page and the messages of each conversation of a report, whole and one by one.

    The messages are the newest ones or all of them. The name of the store's own messages is empty. Messages
    that cannot be read are added to the report's problems while they are yielded.
    """
    db = Database(store.alias, store.tenant, None)
    key = _key(db, report.session_id)
    total = 0 if report.state is None else report.state.message_count
    start = 1 if newest is None else max(1, total - newest + 1)
    yield "", None, _noting_damage(report, own_messages(db, key, first=start))
    for conversation in conversations_of(db, [key]):
        page = report.conversations.get(conversation.name)
        if page is not None:
            first = 1 if newest is None else -newest
            yield (
                conversation.name,
                page,
                messages_of(db, key, conversation, page.thread or None, first=first),
            )


def _noting_damage(
    report: SessionReport, messages: Iterable[ConversationMessage]
) -> Iterator[ConversationMessage]:
    for message in messages:
        if message.parts is None:
            report.problems.append(f"messages: message {message.number} cannot be read")
        yield message


def report_as_json(store: DatabaseStateStore, report: SessionReport, messages: int | None) -> Iterator[str]:
    """Yield a report that was read without messages as one JSON object with the newest ``messages``.

    Each message is written as soon as it is read, so that a long conversation takes no more memory.
    """
    document = report.to_dict()
    conversations = document.pop("conversations")
    del document["problems"]
    if messages is None:
        rest = {"conversations": conversations, "problems": report.problems}
        yield f"{json.dumps(document)[:-1]}, {json.dumps(rest)[1:]}"
        return
    del document["messages"]
    yield f'{json.dumps(document)[:-1]}, "messages": '
    separator = ', "conversations": {'
    for name, _page, found in whole_messages(store, report, messages):
        if name:
            plain = conversations[name]
            path = plain.pop("path")
            del plain["messages"]
            yield f'{separator}{json.dumps(name)}: {json.dumps(plain)[:-1]}, "messages": '
            yield from _json_list(map(_plain_message, found))
            yield f', "path": {json.dumps(path)}}}'
            separator = ", "
        else:
            yield from _json_list({"sequence": each.number, "message": each.stored} for each in found)
    yield ', "conversations": {' if separator != ", " else ""
    yield f'}}, "problems": {json.dumps(report.problems)}}}'


def conversations_as_json(
    store: DatabaseStateStore, session_id: str, *, may_view: Callable[[type[Model]], bool]
) -> Iterator[str]:
    """Yield all conversations of a session with all their threads as one JSON object, message by message."""
    db = Database(store.alias, store.tenant, None)
    key = _key(db, session_id)
    yield f'{json.dumps({"tenant": store.tenant, "session_id": session_id})[:-1]}, "conversations": ['
    separator = ""
    if may_view(MessageRow):
        yield '{"framework": null, "thread": "", "messages": '
        yield from _json_list(map(_plain_message, own_messages(db, key)))
        separator = "}, "
    for conversation in conversations_of(db, [key], may_view):
        for thread in threads_of(db, key, conversation):
            named = json.dumps({"framework": conversation.name, "thread": thread})[:-1]
            yield f'{separator}{named}, "messages": '
            yield from _json_list(map(_plain_message, messages_of(db, key, conversation, thread)))
            separator = "}, "
    yield "}]}" if separator else "]}"


def _key(db: Database, session_id: str) -> int:
    """Return the key of a session's row. Raise `SessionNotFound`."""
    key = db.query(session_with_id(db, session_id).values_list("pk", flat=True).first)
    if key is None:
        raise SessionNotFound(session_id)
    return int(key)


def _json_list(items: Iterable[Any]) -> Iterator[str]:
    separator = "["
    for item in items:
        yield f"{separator}{json.dumps(item)}"
        separator = ", "
    yield "[]" if separator == "[" else "]"


def session_report(
    store: DatabaseStateStore, session_id: str, *, limit: int = 10, messages: int | None = None
) -> SessionReport:
    """Return a report of a session, with up to ``limit`` posts, runs and checkpoints, and with ``messages``,
    both the store's own and those of each adapter.

    A damaged part does not hide the others. Raise `SessionNotFound`. Each part is read separately, so if the
    session is being written, one part may be older than another.
    """
    report = SessionReport(tenant=store.tenant, session_id=session_id)

    def read(name: str, body: Callable[[], T]) -> T | None:
        try:
            return body()
        except IntegrityFault as exc:
            report.problems.append(f"{name}: {exc}")
            return None

    if not store.session_exists(session_id):
        raise SessionNotFound(session_id)
    db = Database(store.alias, store.tenant, None)
    posts = Post.objects.using(db.alias).filter(session_id=pk_of(db, session_id))
    usage = DatabaseUsageStore(store.alias, tenant=store.tenant)
    report.state = read("state", lambda: store.load_state(session_id))
    report.interrupt = read("interrupt", lambda: store.check_interrupt(session_id))
    report.runs = read("runs", lambda: store.list_runs(session_id, limit=limit))
    report.sub_sessions = read("sub_sessions", lambda: store.get_sub_session_refs(session_id))
    report.decisions = read("decisions", lambda: db.query(lambda: newest_decisions(db, session_id, limit)))
    report.open_effects = read(
        "open_effects", lambda: store.list_effects(session_id, states=_OPEN_EFFECTS, limit=limit).items
    )
    report.waiting_posts = read("waiting_posts", lambda: db.query(lambda: waiting_posts(posts, limit=limit)))
    report.checkpoints = read("checkpoints", lambda: store.list_checkpoints(session_id, limit=limit))
    report.usage = read("usage", lambda: usage.get_rollup(session_id))
    state = report.state
    if state is not None:
        spender = Spender(state.root_session_id or session_id, state.user_id, state.agent_type)
        report.budgets = read("budgets", lambda: reports_of_session(db, spender))
    report.unpriced = unpriced_entries(session_id, using=store.alias, tenant=store.tenant)
    if messages is not None:
        report.messages = read("messages", lambda: _newest(store, session_id, messages))
    key = db.query(lambda: session_with_id(db, session_id).values_list("pk", flat=True).first())
    if key is not None:
        report.stuck = conditions_of(db, [key]).get(key)
        found = read("conversations", lambda: _conversations(db, key, limit, messages))
        report.conversations = found or {}
        has_messages = state is not None and state.message_count
        if not has_messages and not any(page.total for page in report.conversations.values()):
            report.unread_rows = read("unread_rows", lambda: unread_rows(db, key)) or {}
    return report


def _conversations(db: Database, key: int, limit: int, messages: int | None) -> dict[str, ConversationPage]:
    found = {}
    for conversation in conversations_of(db, [key]):
        page = conversation.page(db, key, first=None, limit=messages or 1)
        if page is not None:
            shown = () if messages is None else page.messages
            found[conversation.name] = replace(page, messages=shown, path=page.path[:limit])
    return found


def _newest(store: DatabaseStateStore, session_id: str, count: int) -> list[tuple[int, Message]]:
    page = store.get_messages(session_id, limit=count, order="desc")
    return [(page.total - index, message) for index, message in enumerate(page.messages)][::-1]


# --- Decisions


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownDecision(Serializable):
    """An answer to an approval, and the step or the effect that has used it."""

    tool_call_id: str
    outcome: str
    is_final: bool
    actor: str | None
    digest: str | None
    reason: str | None
    decided_at: datetime
    used_at: datetime | None
    used_by: str | None


def newest_decisions(db: Database, session_id: str, limit: int) -> list[ShownDecision]:
    rows = Decision.objects.using(db.alias).filter(session_id=pk_of(db, session_id)).order_by("-version")
    columns = ("tool_call_id", "outcome", "is_final", "actor", "digest", "reason", "decided_at", "used_at")
    return [
        ShownDecision(**dict(zip(columns, row, strict=False)), used_by=row[-2] or row[-1])
        for row in rows.values_list(*columns, "used_by_step", "used_by_effect")[:limit]
    ]


# --- Waiting posts


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingPost(Serializable):
    """A waiting post. ``text`` is the start of its content, or ``None`` if it cannot be read."""

    post_id: str
    sequence: int
    author: str | None
    key: str | None
    posted_at: datetime
    due_at: datetime
    text: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingPosts(Serializable):
    items: list[WaitingPost]
    total: int


def waiting_posts(posts: QuerySet[Post], *, first: int = 0, limit: int) -> WaitingPosts:
    """Return a page of the waiting posts of a session, from the index ``first``."""
    waiting = posts.filter(state=PostState.WAITING)
    columns = ("post_id", "sequence", "author", "key", "posted_at", "due_at")
    rows = waiting.order_by("due_at", "sequence").values(*columns, start=payload_start())
    page = rows[first : first + limit]
    items = [WaitingPost(text=said_at_start(row.pop("start") or ""), **row) for row in page]
    return WaitingPosts(items=items, total=waiting.count())


# --- The tree: ancestors and sub-sessions


def session_tree(store: DatabaseStateStore, session_id: str, *, root_id: str | None = None) -> TreeNode:
    """Return the tree below the root, or below the session itself if the root has been deleted.

    Raise `SessionNotFound`.
    """
    directory = SessionDirectory(store.alias, tenant=store.tenant)
    if root_id not in (None, session_id):
        try:
            return directory.tree(str(root_id), tenant=store.tenant)
        except SessionNotFound:
            pass  # The root has been deleted, so the remaining tree starts at this session.
    return directory.tree(session_id, tenant=store.tenant)


def nodes_of(tree: TreeNode) -> list[dict[str, Any]]:
    """Return the nodes of a tree from top to bottom, each with its depth and its parent session."""
    above: list[str] = []
    nodes = []
    for way, node in tree.walk():
        del above[len(way) :]
        nodes.append(
            {
                "session_id": node.session_id,
                "depth": len(way),
                "above": above[-1] if above else None,
                "is_repeated": node.is_repeated,
                "session": None if node.head is None else node.head.to_dict(),
                "ref": None if node.ref is None else node.ref.to_dict(),
            }
        )
        above.append(node.session_id)
    return nodes


class Position(NamedTuple):
    """A place in the history of a session: one checkpoint, or the current state.

    Without a ``checkpoint_id`` and a ``step``, it is the checkpoint that is ``before`` steps older than the
    newest one.
    """

    session_id: str
    checkpoint_id: str | None = None
    step: int | None = None
    before: int = 0
    is_current: bool = False


def named_position(text: str) -> Position | None:
    """Return the position that text such as ``trip@step-57`` or a checkpoint id names, or ``None``.

    The text may also be the id of another session: look for that first.
    """
    if match := _POSITION.fullmatch(text):
        return Position(
            match["session_id"],
            step=int(match["step"]) if match["step"] else None,
            before=int(match["before"] or 0),
            is_current=match["current"] is not None,
        )
    with suppress(InvalidPayload):
        return Position(parse_checkpoint_id(text).session_id, checkpoint_id=text)
    return None


def checkpoint_of_step(store: DatabaseStateStore, session_id: str, number: int) -> str | None:
    """Return the id of the newest checkpoint of a session's step with this number, or ``None``.

    This takes one statement, which reads the steps after it.
    """
    db = Database(store.alias, store.tenant)
    found = step_checkpoints(db, pk_of(db, session_id)).filter(step_count=number).order_by("-version")
    return db.query(found.values_list("checkpoint_id", flat=True).first)
