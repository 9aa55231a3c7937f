"""A session as text: its head, its state as JSON, tables of its records, and its conversation."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple

from helix_store.catalogue import ConversationPage, Outline
from helix_store.core.transcript import Part, Turn, paired, turns
from helix_store.core.types import Run, SessionHead, SessionState
from helix_store.core.usage import UsageRollup
from helix_store.management.output import STATUS_STYLES, Column, Layout, Style, cell, pairs, table
from helix_store.management.spending_tables import budgets_table
from helix_store.management.text import cut, visible, wrapped
from helix_store.reports.budgets import budget_that_stopped
from helix_store.reports.conversations import text_of
from helix_store.reports.session import SessionReport
from helix_store.reports.times import NOTHING, epoch_moment, moment
from helix_store.stores.directory import TreeNode

_LINES_OF_JSON: Final = 40
_INDENT: Final = "    "
_RESULT_INDENT: Final = "      "
_LINES_OF_RESULT: Final = 12
_UNLIMITED: Final = 10**9
_PART_STYLES: Final[dict[str, Style]] = {"thinking": "dim", "call": "yellow"}
_STYLES: Final[dict[str, Style]] = {"user": "cyan", "assistant": "green", "system": "yellow", "tool": "blue"}


class ListedSession(NamedTuple):
    """A session in a list. ``found`` is a framework with the outline of its conversation."""

    tenant: str
    head: SessionHead
    found: tuple[str, Outline] | None


SESSION_COLUMNS: Final = (
    Column("title", lambda row: row.head.title or None, minimum=12, is_optional=True, may_be_empty=True),
    Column("session", attrgetter("head.session_id"), cut="id", minimum=16),
    Column("tenant", lambda row: row.tenant or None, cut="middle", minimum=6, may_be_empty=True),
    Column("agent type", attrgetter("head.agent_type"), minimum=6),
    Column("status", attrgetter("head.status.value"), cut="never", style=STATUS_STYLES.get),
    Column("user", attrgetter("head.user_id"), cut="middle", minimum=6, is_optional=True, may_be_empty=True),
    Column("steps", attrgetter("head.step_count"), cut="never", right=True, is_optional=True),
    Column("msgs", lambda row: _message_count(row), cut="never", right=True, is_optional=True),
    Column("updated", attrgetter("head.updated_at"), cut="never"),
)

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

_PATH_COLUMNS: Final = (
    Column("step", attrgetter("step"), cut="never", right=True),
    Column("checkpoint", attrgetter("step_id"), cut="middle", minimum=16),
    Column("source", attrgetter("name"), minimum=6, may_be_empty=True),
    Column("msgs", attrgetter("count"), cut="never", right=True),
    Column("created", attrgetter("at"), cut="never"),
)

_UNREADABLE: Final = Part(kind="other", text="", name="This message cannot be read.")


def json_lines(value: Any, width: int | None, *, indent: str = "  ", limit: int | None = None) -> list[str]:
    """Return a value as indented JSON that is safe in a terminal. It is cut unless ``width`` is ``None``."""
    lines = [indent + visible(line) for line in json.dumps(value, indent=2, ensure_ascii=False).split("\n")]
    if width is None:
        return lines
    return [cut(line, width) for line in capped(lines, limit)]


def session_sections(report: SessionReport, layout: Layout) -> Iterator[str]:
    """Yield the sections of a session's page, except empty ones. Sections without content are left out."""
    if report.state is not None:
        yield pairs(_head_pairs(report, report.state), layout)
        yield from _json_sections(report.state, layout)
        calls = report.state.pending_client_tool_calls
        rows = [_call_row(call_id, call) for call_id, call in calls.items()]
        yield from _table("pending tool calls", _CALL_COLUMNS, rows, layout)
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
    for name, page in report.conversations.items():
        heading = f"{name}: checkpoints that led to the newest message"
        yield from _table(heading, _PATH_COLUMNS, page.path, layout)
        if page.messages:
            thread = f" of {page.thread}" if page.threads else ""
            heading = f"{name}: messages{thread}, newest {len(page.messages):,} of {_total(page)}"
            said = [
                (each.number, each.role, [_UNREADABLE] if each.parts is None else each.parts)
                for each in page.messages
            ]
            yield _section(cell(heading), _blocks(paired(said), layout), layout)


def _blocks(shown: Iterable[Turn], layout: Layout) -> str:
    return "\n\n".join(conversation(shown, layout)) or NOTHING


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
            lines = json_lines(document, layout.width, limit=_LINES_OF_JSON)
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


def conversation(turns: Iterable[Turn], layout: Layout) -> Iterator[str]:
    """Yield one block of text per message, with its sequence number and role above it.

    The result of a call is printed below it. Long results are cut, unless the width is ``None``.
    """
    for turn in turns:
        lines = [layout.coloured(f"{turn.sequence}  {cell(turn.role)}", "bold", _STYLES.get(turn.role))]
        for own in turn.parts:
            lines.extend(_lines(own.part, layout))
            if own.result is not None:
                lines.extend(_result_lines(own.result, layout))
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
    return [layout.coloured(line, _PART_STYLES.get(part.kind)) for line in lines]


def _result_lines(part: Part, layout: Layout) -> list[str]:
    mark = "✗" if part.is_error else "←"
    name = f"{part.name}: " if part.name else ""
    lines = wrapped(f"{mark} {name}{part.text}", layout.width or _UNLIMITED, indent=_RESULT_INDENT)
    style: Style = "red" if part.is_error else "blue"
    return [layout.coloured(line, style) for line in capped(lines, _limit(layout))]


def _limit(layout: Layout) -> int | None:
    return None if layout.width is None else _LINES_OF_RESULT
