"""A session as text: its head, its state as JSON, tables of its records, and its conversation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

from helix_store.catalogue import ConversationPage, Outline
from helix_store.core.transcript import Part, paired, turns
from helix_store.core.types import CheckpointHead, Run, SessionHead, SessionState
from helix_store.core.usage import UsageRollup
from helix_store.management.budget_tables import budgets_table, stopped
from helix_store.management.conversation import capped, conversation
from helix_store.management.output import (
    NOTHING,
    Colours,
    Column,
    cell,
    pairs,
    status_style,
    table,
)
from helix_store.management.text import cut, visible
from helix_store.reports.session import SessionReport
from helix_store.reports.times import epoch_moment, moment
from helix_store.stores.directory import TreeNode

__all__ = [
    "CHECKPOINT_COLUMNS",
    "SESSION_COLUMNS",
    "checkpoint_row",
    "json_lines",
    "session_row",
    "session_sections",
    "tree_lines",
]

_LINES_OF_JSON: Final = 40

SESSION_COLUMNS: Final = (
    Column(heading="title", minimum=12, is_optional=True, may_be_empty=True),
    Column(heading="session", cut="id", minimum=16),
    Column(heading="tenant", cut="middle", minimum=6, may_be_empty=True),
    Column(heading="agent type", minimum=6),
    Column(heading="status", cut="never", style=status_style),
    Column(heading="user", cut="middle", minimum=6, is_optional=True, may_be_empty=True),
    Column(heading="steps", cut="never", right=True, is_optional=True),
    Column(heading="msgs", cut="never", right=True, is_optional=True),
    Column(heading="updated", cut="never"),
)

CHECKPOINT_COLUMNS: Final = (
    Column(heading="checkpoint", cut="middle", minimum=16),
    Column(heading="step", minimum=6),
    Column(heading="steps", cut="never", right=True),
    Column(heading="status", cut="never", style=status_style),
    Column(heading="msgs", cut="never", right=True),
    Column(heading="created", cut="never"),
)

_RUN_COLUMNS: Final = (
    Column(heading="turn", cut="never", right=True),
    Column(heading="run", cut="id", minimum=8),
    Column(heading="status", minimum=11, style=status_style),
    Column(heading="steps", cut="never", right=True),
    Column(heading="started", cut="never"),
    Column(heading="reason", minimum=6),
)

_REF_COLUMNS: Final = (
    Column(heading="sub-session", cut="id", minimum=36),
    Column(heading="agent type"),
    Column(heading="status", style=status_style),
    Column(heading="location", cut="never"),
    Column(heading="tool call", cut="middle"),
)

_CALL_COLUMNS: Final = (
    Column(heading="tool call", cut="id", minimum=14),
    Column(heading="tool"),
    Column(heading="deadline", cut="never"),
    Column(heading="approval", cut="middle"),
)

_PATH_COLUMNS: Final = (
    Column(heading="step", cut="never", right=True),
    Column(heading="checkpoint", cut="middle", minimum=16),
    Column(heading="source", minimum=6, may_be_empty=True),
    Column(heading="msgs", cut="never", right=True),
    Column(heading="created", cut="never"),
)

_UNREADABLE: Final = Part(kind="other", text="", name="This message cannot be read.")

_POST_COLUMNS: Final = (
    Column(heading="#", cut="never", right=True),
    Column(heading="post", cut="middle", minimum=16),
    Column(heading="author", cut="middle", minimum=6, is_optional=True, may_be_empty=True),
    Column(heading="due", cut="never"),
    Column(heading="message", minimum=12, may_be_empty=True),
)


def session_row(tenant: str, head: SessionHead, found: tuple[str, Outline] | None) -> list[Any]:
    """Return the cells of `SESSION_COLUMNS`. ``found`` is the conversation that an adapter keeps."""
    return [
        head.title or None,
        head.session_id,
        tenant or None,
        head.agent_type,
        head.status.value,
        head.user_id,
        head.step_count,
        head.message_count if found is None else _count(found[1]),
        head.updated_at,
    ]


def checkpoint_row(head: CheckpointHead) -> list[Any]:
    """Return the cells of `CHECKPOINT_COLUMNS`."""
    return [
        head.checkpoint_id,
        head.step_id,
        head.step_count,
        head.status.value,
        head.message_count,
        head.created_at,
    ]


def json_lines(value: Any, *, width: int | None, indent: str = "  ", limit: int | None = None) -> list[str]:
    """Return a value as indented JSON that is safe in a terminal. It is cut unless ``width`` is ``None``."""
    lines = [indent + visible(line) for line in json.dumps(value, indent=2, ensure_ascii=False).split("\n")]
    if width is None:
        return lines
    return [cut(line, width) for line in capped(lines, limit)]


def session_sections(report: SessionReport, *, width: int | None, colours: Colours) -> Iterator[str]:
    """Yield the sections of a session's page. Sections without content are left out."""
    if report.state is not None:
        yield pairs(_head_pairs(report, report.state), width=width, colours=colours)
        yield from _json_sections(report.state, width, colours)
        calls = report.state.pending_client_tool_calls
        rows = [_call_row(call_id, call) for call_id, call in calls.items()]
        yield from _table("pending tool calls", _CALL_COLUMNS, rows, width, colours)
    if report.waiting_posts is not None:
        posts = report.waiting_posts.items
        heading = f"waiting posts, first {len(posts):,} of {report.waiting_posts.total:,}"
        rows = [[post.sequence, post.post_id, post.author, post.due_at, post.text] for post in posts]
        yield from _table(heading, _POST_COLUMNS, rows, width, colours)
    runs = [
        [
            run.turn,
            run.run_id,
            run.status.value,
            run.step_count,
            run.started_at,
            _reason(run),
        ]
        for run in report.runs or ()
    ]
    yield from _table("runs, newest first", _RUN_COLUMNS, runs, width, colours)
    newest = report.runs[0].error if report.runs else None
    if isinstance(newest, dict) and type(newest.get("traceback")) is str:
        trace = f"{newest['traceback']}{newest.get('type')}: {newest.get('message')}"
        yield _section("error of the newest run", visible(trace, keep="\n"), colours)
    refs = [
        [ref.sub_session_id, ref.agent_type, ref.status, ref.location, ref.parent_tool_call_id]
        for ref in report.sub_sessions or ()
    ]
    yield from _table("sub-sessions", _REF_COLUMNS, refs, width, colours)
    if report.checkpoints is not None:
        items = report.checkpoints.items
        heading = f"checkpoints, newest {len(items):,} of {report.checkpoints.total:,}"
        rows = [checkpoint_row(item) for item in items]
        yield from _table(heading, CHECKPOINT_COLUMNS, rows, width, colours)
    if report.usage is not None and report.usage.entry_count:
        yield _section(
            "usage",
            pairs(_usage_pairs(report.usage, report.unpriced or 0), width=width, colours=colours),
            colours,
        )
    if report.budgets:
        shown = budgets_table(report.budgets, width=width, colours=colours)
        yield _section("budgets", shown, colours)
    if report.messages or (report.messages is not None and not report.conversations):
        blocks = conversation(turns(report.messages), width=width, colours=colours)
        total = report.state.message_count if report.state is not None else "?"
        heading = f"messages, newest {len(report.messages):,} of {total}"
        yield _section(heading, "\n\n".join(blocks) or NOTHING, colours)
    for name, page in report.conversations.items():
        yield from _conversation_sections(name, page, width, colours)


def _conversation_sections(
    name: str, page: ConversationPage, width: int | None, colours: Colours
) -> Iterator[str]:
    rows = [[each.step, each.step_id, each.name, each.count, each.at] for each in page.path]
    heading = f"{name}: checkpoints that led to the newest message"
    yield from _table(heading, _PATH_COLUMNS, rows, width, colours)
    if not page.messages:
        return
    blocks = conversation(
        paired(
            (each.number, each.role, [_UNREADABLE] if each.parts is None else each.parts)
            for each in page.messages
        ),
        width=width,
        colours=colours,
    )
    thread = f" of {page.thread}" if page.threads else ""
    heading = f"{name}: messages{thread}, newest {len(page.messages):,} of {_total(page)}"
    yield _section(cell(heading), "\n\n".join(blocks) or NOTHING, colours)


def _count(outline: Outline) -> str:
    return f"{'>' if outline.is_partial else ''}{outline.count}"


def _total(page: ConversationPage) -> str:
    return f"{'more than ' if page.is_partial else ''}{page.total:,}"


def _section(heading: str, body: str, colours: Colours) -> str:
    return f"{colours(heading.upper(), 'bold')}\n{body}"


def _table(
    heading: str, columns: Sequence[Column], rows: list[list[Any]], width: int | None, colours: Colours
) -> Iterator[str]:
    if rows:
        yield _section(heading, table(columns, rows, width=width, colours=colours), colours)


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
    if not state.status.is_terminal and (why := stopped(report)) is not None:
        yield "stopped", why
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


def _json_sections(state: SessionState, width: int | None, colours: Colours) -> Iterator[str]:
    # Tracing contexts may contain keys of vendors, so only --format json includes them.
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
            lines = json_lines(document, width=width, limit=_LINES_OF_JSON)
            yield _section(heading, "\n".join(lines), colours)


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


def tree_lines(root: TreeNode, *, width: int | None, colours: Colours) -> Iterator[str]:
    """Yield a line for each session of a tree, below its parent session."""
    for way, node in root.walk():
        branches = "".join("   " if is_last else "│  " for is_last in way[:-1])
        if way:
            branches += "└─ " if way[-1] else "├─ "
        status = node.status or NOTHING
        facts = [node.agent_type, status, *_facts(node)]
        line = f"{branches}{cell(node.session_id)}  {'  '.join(cell(fact) for fact in facts)}"
        if width is not None:
            line = cut(line, width)
        style = status_style(status)
        shown = cell(status)
        yield line if style is None else line.replace(f"  {shown}", f"  {colours(shown, style)}", 1)


def _facts(node: TreeNode) -> Iterator[str]:
    if node.head is None:
        yield "remote" if node.is_remote else "missing"
    elif node.is_repeated:
        yield "(see above)"
    else:
        yield f"{node.head.step_count} steps"
        yield moment(node.head.updated_at)
