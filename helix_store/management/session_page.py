"""A session as text: its head, its state as JSON, tables of its records, and its conversation."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from decimal import Decimal
from operator import attrgetter
from typing import Any, Final, NamedTuple

from helix_store.budgets import MOST_COUNTERS
from helix_store.catalogue import ConversationPage, Outline
from helix_store.core.transcript import ConversationMessage, Part, Turn, TurnPart, paired, turns, visible_json
from helix_store.core.types import Run, SessionHead, SessionState
from helix_store.core.usage import BudgetScope, UsageGroup, UsageReport, UsageRollup, UsageTotal, rounded_cost
from helix_store.management.output import (
    STATUS_STYLES,
    Column,
    Layout,
    Style,
    bar,
    cell,
    pairs,
    table,
    visible,
    width_of,
    wrapped,
)
from helix_store.reports.conversations import text_of
from helix_store.reports.payloads import NOTHING, epoch_moment, moment
from helix_store.reports.session import BudgetReport, LimitReport, SessionReport, budget_that_stopped
from helix_store.stores.conditions import StuckSession, is_mere
from helix_store.stores.directory import TreeNode

_NUMBERS: Final = ("cost USD", "tokens")
_MORE_NUMBERS: Final = ("prompt", "completion", "entries", "tools")
"""The last of these columns are left out if the terminal is too narrow."""
_GAP: Final = 2
_SMALLEST_NAME: Final = 12
_BAR_WITHOUT_END: Final = 40
_SMALLEST_BAR: Final = 5
_BUDGET_BAR: Final = 12


def groups_table(report: UsageReport, layout: Layout) -> str:
    """Return a row for each group, and the total."""
    headings, names = _names(report)
    totals: list[UsageTotal] = [*report.groups, report.total]
    costs = _aligned(total.known_cost for total in totals)
    columns = [
        *(Column(heading=heading, cut="middle", minimum=_SMALLEST_NAME) for heading in headings),
        *(Column(heading=heading, cut="never", right=True) for heading in _NUMBERS),
        *(Column(heading=heading, cut="never", right=True, is_optional=True) for heading in _MORE_NUMBERS),
    ]
    rows = [[*name, cost, *_counts(total)] for name, cost, total in zip(names, costs, totals, strict=True)]
    return table(columns, rows, layout)


def days_table(report: UsageReport, layout: Layout, *, zone: str) -> str:
    """Return a row for each day, with a bar for its cost, or for its tokens if no entry has a cost."""
    costs = iter(_aligned(total.known_cost for total in (*report.groups, report.total)))
    texts = [[day.group or "", next(costs), *_short_counts(day)] for day in report.groups]
    texts.append(["total", next(costs), *_short_counts(report.total)])
    headings = [f"day ({zone})", "cost USD", "tokens", "entries"]
    widths = (max(map(width_of, column)) for column in zip(headings, *texts, strict=True))
    used = sum(widths) + len(headings) * _GAP
    room = _BAR_WITHOUT_END if layout.width is None else max(layout.width - used, _SMALLEST_BAR)
    by_cost = bool(report.total.cost_usd)
    values = [float(day.cost_usd if by_cost else day.tokens.total) for day in report.groups]
    bars = [*(bar(value, maximum=max(values), width=room) for value in values), ""]
    columns = [
        Column(heading=headings[0], cut="never"),
        *(Column(heading=heading, cut="never", right=True) for heading in headings[1:]),
        Column(heading="", cut="never", style=lambda text: "cyan"),
    ]
    rows = [[*row, drawn] for row, drawn in zip(texts, bars, strict=True)]
    return table(columns, rows, layout)


def _names(report: UsageReport) -> tuple[list[str], list[list[str]]]:
    """Return the headings of the columns that name a group, and the names. The last row is the total."""
    heading = report.by.value.replace("_", " ")
    names = [[_label(group)] for group in report.groups]
    if not any(group.tenant for group in report.groups):
        return [heading], [*names, ["total"]]
    tenants = [[group.tenant or "", *name] for group, name in zip(report.groups, names, strict=True)]
    return ["tenant", heading], [*tenants, ["total", ""]]


def _label(group: UsageGroup) -> str:
    if group.group is None:
        return "(none)"
    return f"{group.group} *" if group.is_deleted else group.group


def _counts(total: UsageTotal) -> list[str]:
    tokens = total.tokens
    counts = (tokens.total, tokens.prompt, tokens.completion, total.entry_count, total.tool_calls)
    return [f"{count:,}" for count in counts]


def _short_counts(total: UsageTotal) -> list[str]:
    return [f"{total.tokens.total:,}", f"{total.entry_count:,}"]


def _aligned(costs: Iterable[Decimal | None]) -> list[str]:
    """Return rounded costs with aligned decimal points, and ``unknown`` for ``None``."""
    texts = ["unknown" if cost is None else rounded_cost(cost) for cost in costs]
    places = max(len(text.partition(".")[2]) for text in texts)
    return [text + " " * (places - len(text.partition(".")[2])) if "." in text else text for text in texts]


def _bar_style(text: str) -> Style | None:
    return "red" if text.startswith("reached") else "cyan"


_BUDGET_COLUMNS: Final = (
    Column(heading="tenant", cut="middle", minimum=6, may_be_empty=True),
    Column(heading="budget", cut="middle", minimum=10),
    Column(heading="caps", cut="middle", minimum=10),
    Column(heading="period", cut="never"),
    Column(heading="unit", cut="never"),
    Column(heading="spent", cut="never", right=True),
    Column(heading="held", cut="never", right=True),
    Column(heading="limit", cut="never", right=True),
    Column(heading="left", cut="never", right=True),
    Column(heading="", cut="never", style=_bar_style),
    Column(heading="resets", cut="never", is_optional=True, may_be_empty=True),
)


def budgets_table(reports: Sequence[BudgetReport], layout: Layout) -> str:
    rows = [row for report in reports for row in _limit_rows(report)]
    return table(_BUDGET_COLUMNS, rows, layout)


def _limit_rows(report: BudgetReport) -> Iterator[list[Any]]:
    names: list[Any] = [report.tenant or None, report.status.name, _capped(report), report.period.value]
    for limit in report.limits:
        figures = (limit.spent, limit.held, limit.limit, limit.remaining)
        amounts = [limit.amount(each).removeprefix("$") for each in figures]
        unit = "USD" if limit.unit == "usd" else "tokens"
        yield [*names, unit, *amounts, _limit_bar(limit), report.status.resets_at]
        names = [None if name is None else "" for name in names]


def _limit_bar(limit: LimitReport) -> str:
    if limit.is_reached:
        return "reached"
    return bar(float(limit.limit - limit.remaining), maximum=float(limit.limit), width=_BUDGET_BAR)


def _capped(report: BudgetReport) -> str:
    kind = report.scope.value.replace("_", " ")
    if report.scope is BudgetScope.TENANT:
        return "the tenant"
    if not report.is_for_each:
        return f"{kind} {report.status.value}"
    if report.value_count is None:
        return f"each {kind}: {report.status.value}"
    if report.status.value is None:
        return f"each {kind}"
    count = f"{min(report.value_count, MOST_COUNTERS):,}"
    return f"each {kind}, highest of {count}: {report.status.value}"


_LINES_OF_JSON: Final = 40
_INDENT: Final = "    "
_RESULT_INDENT: Final = "      "
_LINES_OF_RESULT: Final = 12
_UNLIMITED: Final = 10**9
_WINDOW: Final = 200
_CHARACTERS_OF_WINDOW: Final = 4_000_000
_CUT: Final = "… only the start of this message was read; --wide prints all of it"
_PART_STYLES: Final[dict[str, Style]] = {"thinking": "dim", "call": "yellow"}
_STYLES: Final[dict[str, Style]] = {"user": "cyan", "assistant": "green", "system": "yellow", "tool": "blue"}


class ListedSession(NamedTuple):
    """A session in a list. ``found`` is a framework with the outline of its conversation, and ``stuck`` says
    why the session cannot go on.
    """

    tenant: str
    head: SessionHead
    found: tuple[str, Outline] | None
    stuck: StuckSession | None = None


SESSION_COLUMNS: Final = (
    Column("title", lambda row: row.head.title or None, minimum=12, is_optional=True, may_be_empty=True),
    Column("session", attrgetter("head.session_id"), cut="id", minimum=16),
    Column("tenant", lambda row: row.tenant or None, cut="middle", minimum=6, may_be_empty=True),
    Column("agent type", attrgetter("head.agent_type"), minimum=6),
    Column("status", lambda row: _status(row), cut="never", style=STATUS_STYLES.get),
    Column("user", attrgetter("head.user_id"), cut="middle", minimum=6, is_optional=True, may_be_empty=True),
    Column("steps", attrgetter("head.step_count"), cut="never", right=True, is_optional=True),
    Column("msgs", lambda row: _message_count(row), cut="never", right=True, is_optional=True),
    Column("updated", attrgetter("head.updated_at"), cut="never"),
)


def _status(row: ListedSession) -> str:
    status = row.head.status
    return row.stuck.condition if row.stuck is not None and is_mere(status) else status.value


CHECKPOINT_COLUMNS: Final = (
    Column("checkpoint", attrgetter("checkpoint_id"), cut="middle", minimum=16),
    Column("step", attrgetter("step_id"), minimum=6),
    Column("steps", attrgetter("step_count"), cut="never", right=True),
    Column("status", attrgetter("status.value"), cut="never", style=STATUS_STYLES.get),
    Column("msgs", attrgetter("message_count"), cut="never", right=True),
    Column("created", attrgetter("created_at"), cut="never"),
)

POST_COLUMNS: Final = (
    Column("#", attrgetter("sequence"), cut="never", right=True),
    Column("post", attrgetter("post_id"), cut="middle", minimum=16),
    Column("author", attrgetter("author"), cut="middle", minimum=6, is_optional=True, may_be_empty=True),
)

EFFECT_COLUMNS: Final = (
    Column("#", attrgetter("sequence"), cut="never", right=True),
    Column("effect", attrgetter("id"), cut="middle", minimum=14),
    Column("tool", attrgetter("tool_name"), minimum=6, may_be_empty=True),
    Column("state", attrgetter("state"), cut="never"),
    Column("attempt", attrgetter("attempt"), cut="never", right=True, is_optional=True),
    Column("started", attrgetter("started_at"), cut="never"),
    Column("ended", attrgetter("ended_at"), cut="never", is_optional=True),
)

SESSION_OF_EFFECT: Final = Column("session", attrgetter("session_id"), cut="id", minimum=8)

_WAITING_POST_COLUMNS: Final = (
    *POST_COLUMNS,
    Column("due", attrgetter("due_at"), cut="never"),
    Column("message", attrgetter("text"), minimum=12, may_be_empty=True),
)

_RUN_COLUMNS: Final = (
    Column("turn", attrgetter("turn"), cut="never", right=True),
    Column("run", attrgetter("run_id"), cut="id", minimum=8),
    Column("status", attrgetter("status.value"), minimum=11, style=STATUS_STYLES.get),
    Column("steps", attrgetter("step_count"), cut="never", right=True),
    Column("started", attrgetter("started_at"), cut="never"),
    Column("reason", lambda run: _reason(run), minimum=6),
)

_REF_COLUMNS: Final = (
    Column("sub-session", attrgetter("sub_session_id"), cut="id", minimum=36),
    Column("agent type", attrgetter("agent_type")),
    Column("status", attrgetter("status"), style=STATUS_STYLES.get),
    Column("location", attrgetter("location"), cut="never"),
    Column("tool call", attrgetter("parent_tool_call_id"), cut="middle"),
)

_CALL_COLUMNS: Final = (
    Column("tool call", cut="id", minimum=14),
    Column("tool"),
    Column("deadline", cut="never"),
    Column("approval", cut="middle"),
)

_DECISION_COLUMNS: Final = (
    Column("tool call", attrgetter("tool_call_id"), cut="middle", minimum=14),
    Column("decision", lambda each: each.outcome if each.is_final else f"{each.outcome}, not the last"),
    Column("by", attrgetter("actor"), may_be_empty=True),
    Column("reason", attrgetter("reason"), may_be_empty=True),
    Column("decided", attrgetter("decided_at"), cut="never"),
    Column("used by", attrgetter("used_by"), cut="middle", may_be_empty=True),
)

_PATH_COLUMNS: Final = (
    Column("step", attrgetter("step"), cut="never", right=True),
    Column("checkpoint", attrgetter("step_id"), cut="middle", minimum=16),
    Column("source", attrgetter("name"), minimum=6, may_be_empty=True),
    Column("msgs", attrgetter("count"), cut="never", right=True),
    Column("created", attrgetter("at"), cut="never"),
)

_UNREADABLE: Final = Part(kind="other", text="", name="This message cannot be read.")


def json_lines(value: Any, layout: Layout, *, indent: str = "  ", limit: int | None = None) -> list[str]:
    """Return a value as indented JSON that is safe in a terminal, with at most ``limit`` lines."""
    text = visible_json(json.dumps(value, indent=2, ensure_ascii=False))
    lines = [indent + line for line in text.split("\n")]
    return [layout.fitted(line) for line in capped(lines, None if layout.is_whole else limit)]


def session_sections(report: SessionReport, layout: Layout) -> Iterator[str]:
    """Yield the sections of a session's page, except empty ones. Sections without content are left out."""
    if report.state is not None:
        yield pairs(_head_pairs(report, report.state), layout)
        yield from _json_sections(report.state, layout)
        calls = report.state.pending_client_tool_calls
        rows = [_call_row(call_id, call) for call_id, call in calls.items()]
        yield from _table("pending tool calls", _CALL_COLUMNS, rows, layout)
    yield from _table("effects that are not decided", EFFECT_COLUMNS, report.open_effects, layout)
    yield from _table("decisions, newest first", _DECISION_COLUMNS, report.decisions, layout)
    if report.waiting_posts is not None:
        posts = report.waiting_posts.items
        heading = f"waiting posts, first {len(posts):,} of {report.waiting_posts.total:,}"
        yield from _table(heading, _WAITING_POST_COLUMNS, posts, layout)
    yield from _table("runs, newest first", _RUN_COLUMNS, report.runs, layout)
    newest = report.runs[0].error if report.runs else None
    if isinstance(newest, dict) and type(newest.get("traceback")) is str:
        trace = f"{newest['traceback']}{newest.get('type')}: {newest.get('message')}"
        yield _section("error of the newest run", visible(trace, keep="\n"), layout)
    yield from _table("sub-sessions", _REF_COLUMNS, report.sub_sessions, layout)
    if report.checkpoints is not None:
        items = report.checkpoints.items
        heading = f"checkpoints, newest {len(items):,} of {report.checkpoints.total:,}"
        yield from _table(heading, CHECKPOINT_COLUMNS, items, layout)
    if report.usage is not None and report.usage.entry_count:
        yield _section("usage", pairs(_usage_pairs(report.usage, report.unpriced or 0), layout), layout)
    if report.budgets:
        yield _section("budgets", budgets_table(report.budgets, layout), layout)
    if report.messages or (report.messages is not None and not report.conversations):
        total = report.state.message_count if report.state is not None else "?"
        heading = f"messages, newest {len(report.messages):,} of {total}"
        yield _section(heading, _blocks(turns(report.messages), layout), layout)
    if report.unread_rows:
        heading = "rows that no conversation shows"
        yield _section(heading, pairs(report.unread_rows.items(), layout), layout)
    for name, page in report.conversations.items():
        heading = f"{name}: checkpoints that led to the newest message"
        yield from _table(heading, _PATH_COLUMNS, page.path, layout)
        if page.messages:
            said = [_readable(each) for each in page.messages]
            cut = {each.number for each in page.messages if each.is_cut}
            body = _blocks(paired(said, cut), layout, cut)
            yield _section(cell(_messages_heading(name, page, len(page.messages))), body, layout)
        if len(page.threads) > 1:
            yield _section(f"{name}: threads", _threads(page, layout), layout)


def whole_sections(
    conversations: Iterable[tuple[str, ConversationPage | None, Iterable[ConversationMessage]]],
    layout: Layout,
) -> Iterator[str]:
    """Yield the text of whole conversations, a few messages at a time."""
    for name, page, messages in conversations:
        heading = "messages" if page is None else _messages_heading(name, page, None)
        for shown in _windows(messages):
            if heading:
                yield layout.coloured(cell(heading).upper(), "bold")
            heading = ""
            yield "\n\n".join(conversation(shown, layout))


def _windows(messages: Iterable[ConversationMessage]) -> Iterator[list[Turn]]:
    """Yield a conversation in windows, each of which ends, if possible, where every call has its result."""
    window: list[tuple[int, str, Sequence[Part]]] = []
    cut: set[int] = set()
    length = 0
    for message in messages:
        window.append(_readable(message))
        if message.is_cut:
            cut.add(message.number)
        length += sum(len(part.text) + len(part.rest) for part in window[-1][2])
        if len(window) >= _WINDOW or length >= _CHARACTERS_OF_WINDOW:
            shown = paired(window, cut)
            is_late = len(window) >= 2 * _WINDOW or length >= 2 * _CHARACTERS_OF_WINDOW
            if is_late or not any(_is_open(own) for turn in shown for own in turn.parts):
                yield shown
                window, length = [], 0
    if window:
        yield paired(window, cut)


def _is_open(own: TurnPart) -> bool:
    return own.part.kind == "call" and own.result is None


def _readable(message: ConversationMessage) -> tuple[int, str, Sequence[Part]]:
    return message.number, message.role, [_UNREADABLE] if message.parts is None else message.parts


def _messages_heading(name: str, page: ConversationPage, count: int | None) -> str:
    thread = f" of {page.thread}" if page.threads else ""
    newest = "" if count is None else f", newest {count:,} of {_total(page)}"
    return f"{name}: messages{thread}{newest}"


def _threads(page: ConversationPage, layout: Layout) -> str:
    """Return the names of the other threads, and how to read them."""
    others = [thread for thread in page.threads if thread != page.thread]
    more = max(0, (page.thread_count or 0) - len(page.threads))
    named = ", ".join(f"{cell(thread)}" if thread else '""' for thread in others)
    text = f"{named}{f' and {more:,} more' if more else ''}; --markdown prints all of them"
    return "\n".join(wrapped(text, layout.width or _UNLIMITED, indent=_INDENT))


def _blocks(shown: Iterable[Turn], layout: Layout, cut: Collection[int] = ()) -> str:
    return "\n\n".join(conversation(shown, layout, cut)) or NOTHING


def _message_count(listed: ListedSession) -> int | str:
    if listed.found is None:
        return listed.head.message_count
    _, outline = listed.found
    return f"{'>' if outline.is_partial else ''}{outline.count}"


def _total(page: ConversationPage) -> str:
    return f"{'more than ' if page.is_partial else ''}{page.total:,}"


def _section(heading: str, body: str, layout: Layout) -> str:
    return f"{layout.coloured(heading.upper(), 'bold')}\n{body}"


def _table(
    heading: str, columns: Sequence[Column], rows: Sequence[Any] | None, layout: Layout
) -> Iterator[str]:
    if rows:
        yield _section(heading, table(columns, rows, layout), layout)


def _head_pairs(report: SessionReport, state: SessionState) -> Iterator[tuple[str, Any]]:
    yield "session", state.session_id
    yield "tenant", report.tenant or '"" (the default)'
    yield "agent type", state.agent_type
    yield "status", state.status.value
    if report.stuck is not None:
        detail = "" if report.stuck.detail is None else f": {report.stuck.detail}"
        yield "condition", f"{report.stuck.condition} since {moment(report.stuck.since)}{detail}"
    if state.failure_reason is not None:
        yield "failure reason", state.failure_reason
    if state.suspension_kind is not None:
        yield "suspended", f"{state.suspension_kind.value} in step {state.suspended_step_id or NOTHING}"
    if report.interrupt is not None:
        asked = report.interrupt
        yield (
            "interrupt",
            f"{asked.kind.value} requested {moment(asked.requested_at)}, {asked.reason or NOTHING}",
        )
    budget = budget_that_stopped(report.runs[0].completion_reason) if report.runs else None
    if budget is not None and not state.status.is_terminal:
        yield "stopped", f"the budget {budget} did not allow the last step; the next turn tries again"
    optional = {
        "title": state.title,
        "user": state.user_id,
        "mode": None if state.mode is None else state.mode.value,
        "parent": state.parent_session_id,
        "root": None if state.root_session_id == state.session_id else state.root_session_id,
        "stream": None if state.stream_id == state.session_id else state.stream_id,
        "workspace": state.workspace_id,
        "directory": state.directory or None,
        "tags": ", ".join(state.tags) or None,
        "metadata": ", ".join(f"{key}={value}" for key, value in state.metadata.items()) or None,
    }
    yield from ((name, value) for name, value in optional.items() if value is not None)
    yield "version", state.version
    yield (
        "counts",
        (f"{state.step_count:,} steps, {state.message_count:,} messages, {state.resume_count:,} resumes"),
    )
    for name, page in report.conversations.items():
        yield name, f"{_total(page)} messages"
    if state.expires_at is not None:
        yield "expires", epoch_moment(state.expires_at, seconds=True)
    yield "created", moment(state.created_at, seconds=True)
    yield "updated", moment(state.updated_at, seconds=True)


def _json_sections(state: SessionState, layout: Layout) -> Iterator[str]:
    # Tracing contexts may contain vendors' keys, so only --format json includes them.
    documents = {
        "custom state": state.custom_state,
        "output": state.output,
        "error": state.error,
        "suspension context": state.suspension_context,
        "awaited sub-sessions": state.suspended_awaiting_children,
        "answered tool calls": state.completed_client_tool_calls,
        "workspaces": state.workspace_refs,
    }
    for heading, document in documents.items():
        if document not in (None, {}, []):
            lines = json_lines(document, layout, limit=_LINES_OF_JSON)
            yield _section(heading, "\n".join(lines), layout)


def _reason(run: Run) -> str | None:
    message = run.error.get("message") if isinstance(run.error, dict) else None
    return run.completion_reason if type(message) is not str else f"{run.completion_reason}: {message}"


def _call_row(call_id: str, call: Any) -> list[Any]:
    if not isinstance(call, dict):
        return [call_id, None, None, None]
    deadline = call.get("deadline")
    shown = epoch_moment(deadline) if type(deadline) is int else None
    return [call_id, call.get("tool_name"), shown, call.get("approval_id")]


def _usage_pairs(usage: UsageRollup, unpriced: int) -> Iterator[tuple[str, Any]]:
    tokens = usage.tokens
    yield "entries", f"{usage.entry_count:,}"
    yield "tokens", f"{tokens.total:,} ({tokens.prompt:,} prompt, {tokens.completion:,} completion)"
    for model, counts in usage.tokens_by_model.items():
        yield "  model", f"{model}: {counts.total:,}"
    yield "cost", _cost(usage, unpriced)
    for tool, stats in usage.tool_stats.by_tool.items():
        yield "tool", f"{tool}: {stats.calls:,} calls, {stats.failures:,} failed"
    for agent_type, stats in usage.sub_agents.items():
        yield "sub-agent", f"{agent_type}: {stats.calls:,} calls, {stats.failures:,} failed"


def _cost(usage: UsageRollup, unpriced: int) -> str:
    known = f"${usage.cost_usd.normalize():f}"
    if not unpriced:
        return known
    missing = f"token entries without a known cost: {unpriced:,}"
    return f"{known}, {missing}" if usage.cost_usd else f"unknown: {missing}"


def tree_lines(root: TreeNode, layout: Layout) -> Iterator[str]:
    """Yield a line for each session of a tree, below its parent session."""
    for way, node in root.walk():
        branches = "".join("   " if is_last else "│  " for is_last in way[:-1])
        if way:
            branches += "└─ " if way[-1] else "├─ "
        status = node.status or NOTHING
        facts = [node.agent_type, status, *_facts(node)]
        line = layout.fitted(f"{branches}{cell(node.session_id)}  {'  '.join(map(cell, facts))}")
        shown = cell(status)
        in_colour = layout.coloured(shown, STATUS_STYLES.get(status))
        yield line.replace(f"  {shown}", f"  {in_colour}", 1)


def _facts(node: TreeNode) -> Iterator[str]:
    if node.head is None:
        yield "remote" if node.is_remote else "missing"
    elif node.is_repeated:
        yield "(see above)"
    else:
        yield f"{node.head.step_count} steps"
        yield moment(node.head.updated_at)


# --- The conversation: messages with their role, tool calls and tool results


def conversation(turns: Iterable[Turn], layout: Layout, cut: Collection[int] = ()) -> Iterator[str]:
    """Yield one block of text per message, with its sequence number and role above it.

    The result of a call is printed below it. Long results are cut, unless the layout is whole. Of messages
    whose numbers are in ``cut``, only the start was read.
    """
    for turn in turns:
        lines = [layout.coloured(f"{turn.sequence}  {cell(turn.role)}", "bold", _STYLES.get(turn.role))]
        for own in turn.parts:
            lines.extend(_lines(own.part, layout))
            if own.result is not None:
                lines.extend(_result_lines(own.result, layout))
        if turn.sequence in cut:
            lines.append(f"{_INDENT}{_CUT}")
        yield "\n".join(lines)


def capped(lines: Sequence[str], limit: int | None) -> list[str]:
    """Return the first lines, followed by the number of lines that were left out."""
    if limit is None or len(lines) <= limit:
        return list(lines)
    indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    return [*lines[: limit - 1], f"{indent}… {len(lines) - limit + 1} more lines; --wide prints them"]


def _lines(part: Part, layout: Layout) -> list[str]:
    if part.kind == "result":
        return _result_lines(part, layout)
    lines = wrapped(text_of(part), layout.width or _UNLIMITED, indent=_INDENT)
    if part.kind not in ("text", "thinking"):
        lines = capped(lines, _limit(layout))
    coloured = [layout.coloured(line, _PART_STYLES.get(part.kind)) for line in lines]
    return [*coloured, *_rest_lines(part, layout, _INDENT)]


def _rest_lines(part: Part, layout: Layout, indent: str) -> list[str]:
    """Return the other fields of a part, cut to one line unless the layout is whole."""
    if not part.rest:
        return []
    lines = [f"{indent}+ {visible(line)}" for line in part.rest.split("\n")]
    if not layout.is_whole:
        lines = [layout.fitted(f"{indent}{' '.join(line.strip() for line in lines)}")]
    return [layout.coloured(line, "dim") for line in lines]


def _result_lines(part: Part, layout: Layout) -> list[str]:
    mark = "✗" if part.is_error else "←"
    name = f"{part.name}: " if part.name else ""
    lines = wrapped(f"{mark} {name}{part.text}", layout.width or _UNLIMITED, indent=_RESULT_INDENT)
    style: Style = "red" if part.is_error else "blue"
    coloured = [layout.coloured(line, style) for line in capped(lines, _limit(layout))]
    return [*coloured, *_rest_lines(part, layout, _RESULT_INDENT)]


def _limit(layout: Layout) -> int | None:
    return None if layout.is_whole else _LINES_OF_RESULT
