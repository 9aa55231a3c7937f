"""The session of OpenAI Agents SDK in the project's database.

The usage of turns in the usage ledger.

An entry of a turn has the number of the turn as ``step_count``, and the branch as ``run_id``.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from agents import RunContextWrapper, SessionSettings, TResponseInputItem
from agents.memory.session_settings import coerce_session_settings, resolve_session_limit
from agents.result import RunResultBase
from agents.usage import RequestUsage, Usage

from helix_store.adapters import SessionAdapter, session_id_for
from helix_store.contrib.item_storage import plain_json, record_usage
from helix_store.core import validation
from helix_store.core.ids import new_id
from helix_store.core.limits import MAX_BIGINT
from helix_store.core.payloads import copy_json
from helix_store.core.types import UsageKind, UserId
from helix_store.core.usage import TokenCounts, UsageEntry, UsageSource
from helix_store.core.validation import guard
from helix_store.engine.async_twins import async_twin
from helix_store.exceptions import ConflictError, IntegrityFault, InvalidPayload
from helix_store.items import ItemLog, StoredItem, item_key, lane_name
from helix_store.stores import DatabaseUsageStore


class TurnUsage:
    """Records and adds up the requests of one session."""

    def __init__(
        self, session_id: str, *, using: str | None, tenant: str, user_id: str | None, recreate: bool
    ) -> None:
        self.session_id = session_id
        self._sessions = SessionAdapter(
            "openai_agents", using, tenant=tenant, user_id=user_id, recreate=recreate
        )
        self._ledger = DatabaseUsageStore(using=using, tenant=tenant)

    def record(self, result: RunResultBase, *, branch: str, turn: int, anchor: int) -> None:
        """Record each request of a run. ``anchor`` distinguishes turns with the same number."""
        agent = result.last_agent
        model = agent.model if isinstance(agent.model, str) else getattr(agent.model, "model", None)
        run_id = session_id_for(branch)
        now = time.time_ns() // 1_000_000
        entries = [
            UsageEntry(
                id=_entry_id(self.session_id, branch, anchor, index, tokens),
                kind=UsageKind.TOKENS,
                session_id=self.session_id,
                step_count=turn,
                run_id=run_id,
                timestamp=now,
                source=UsageSource(type="agent", name=session_id_for(agent.name or "agent")),
                model=session_id_for(str(model or "default")),
                tokens=tokens,
            )
            for index, tokens in enumerate(_requests(result.context_wrapper.usage))
        ]
        if entries:
            self._sessions.write(self.session_id, partial(record_usage, entries=entries))

    def total(self, *, branch: str | None) -> dict[str, int] | None:
        """Return the sums of one branch or of all, or ``None`` if there are no entries."""
        entries = self._entries(branch)
        if not entries:
            return None
        turns = {(entry.run_id, entry.step_count) for entry in entries}
        return {**_sums(entries), "total_turns": len(turns)}

    def by_turn(self, *, branch: str) -> dict[int, dict[str, int]]:
        """Return the sums of each turn of a branch that has entries."""
        turns: dict[int, list[UsageEntry]] = {}
        for entry in self._entries(branch):
            turns.setdefault(entry.step_count, []).append(entry)
        return {number: _sums(entries) for number, entries in sorted(turns.items())}

    def _entries(self, branch: str | None) -> list[UsageEntry]:
        run_id = None if branch is None else session_id_for(branch)
        entries = self._ledger.get_entries(self.session_id, kinds=UsageKind.TOKENS)
        return [entry for entry in entries if run_id is None or entry.run_id == run_id]

    arecord = async_twin(record)
    atotal = async_twin(total)
    aby_turn = async_twin(by_turn)


def _requests(usage: Usage) -> list[TokenCounts]:
    """Return the requests of a run, preceded by any usage that is known only for the whole run, as one
    request. It comes first, so it keeps its place if the run continues and makes more requests.
    """
    requests = [_tokens(request) for request in usage.request_usage_entries]
    known = sum(requests, TokenCounts()).to_dict()
    counts = {name: max(0, count - known[name]) for name, count in _tokens(usage).to_dict().items()}
    rest = TokenCounts(**counts)
    return [rest, *requests] if rest.prompt or rest.completion or rest.total else requests


def _tokens(usage: RequestUsage | Usage) -> TokenCounts:
    return TokenCounts(
        prompt=usage.input_tokens,
        completion=usage.output_tokens,
        reasoning=usage.output_tokens_details.reasoning_tokens or 0,
        cached=usage.input_tokens_details.cached_tokens or 0,
        cache_write=getattr(usage.input_tokens_details, "cache_write_tokens", None) or 0,
        total=usage.total_tokens,
    )


def _entry_id(session_id: str, branch: str, anchor: int, index: int, tokens: TokenCounts) -> str:
    counts = (tokens.prompt, tokens.completion, tokens.total)
    return session_id_for("openai-agents", session_id, branch, *map(str, (anchor, index, *counts)))


def _sums(entries: list[UsageEntry]) -> dict[str, int]:
    tokens = sum((entry.tokens for entry in entries if entry.tokens is not None), TokenCounts())
    return {
        "requests": len(entries),
        "input_tokens": tokens.prompt,
        "output_tokens": tokens.completion,
        "total_tokens": tokens.total,
    }


AGENT_TYPE: Final = "openai_agents"
_MAIN: Final = "main"
_PREVIEW: Final = 100
_NAMELESS_TOOLS: Final = frozenset(
    {
        "apply_patch_call",
        "code_interpreter_call",
        "computer_call",
        "file_search_call",
        "shell_call",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    }
)
"""Types of items that stand for a tool of the platform, which has no other name."""
_CALLS: Final = frozenset(
    {*_NAMELESS_TOOLS, "custom_tool_call", "function_call", "mcp_approval_request", "mcp_call", "tool_call"}
) - {"tool_search_output"}
"""Types of items that count as the call of a tool."""


class DjangoSession:
    """A session for ``Runner.run(agent, input, session=DjangoSession("chat-1"))``.

    ``session_id`` may be any string: if it is not a valid session id, it gets a readable form with a digest.
    The first item creates the session, unless it exists; admin, usage, retention and erasure find it there.
    Every write is one transaction; if it is cancelled, the caller is told after it has ended. A write sets
    ``user_id`` as the user of a session without one, and raises `ConflictError` if the session belongs to
    another user. With a ``fencing_token``, a write raises `FencedOutError` if the session's lock has a larger
    one. An erased session is not created again, which raises `SessionErased`, unless ``recreate`` is True.

    ``limit`` in the settings is the number of newest items that a run reads; a negative one means all.

    Each branch of the conversation is a lane of the session. ``branch`` is the branch to begin with; the
    current one belongs to the object, not to the stored session. A turn begins with a user message. The calls
    on branches have the names of the SDK's ``AdvancedSQLiteSession``.

    Example::

        session = DjangoSession("chat-1", user_id="ada")
        result = await Runner.run(agent, "What is the capital of France?", session=session)
        await session.store_run_usage(result)
    """

    def __init__(
        self,
        session_id: str,
        *,
        using: str | None = None,
        tenant: str = "",
        session_settings: SessionSettings | dict[str, Any] | None = None,
        branch: str = "main",
        user_id: UserId | None = None,
        fencing_token: int | None = None,
        recreate: bool = False,
    ) -> None:
        self.session_id = session_id
        self.session_settings: SessionSettings | None = coerce_session_settings(session_settings or {})
        self.check_before_pop: Callable[[TResponseInputItem], object] | None = None
        """A function that `pop_item` calls with the newest item, under the session's lock. If it raises an
        error, nothing is deleted.
        """
        self.fencing_token = guard(fencing_token=fencing_token).fencing_token
        self._options: dict[str, Any] = {
            "using": using,
            "tenant": tenant,
            "user_id": user_id,
            "recreate": recreate,
        }
        self._log = self._log_of(item_key(branch, "branch"))
        self._usage = TurnUsage(self._log.session_id, **self._options)

    # --- Items -------------------------------------------------------------------------------------

    async def get_items(
        self,
        limit: int | None = None,
        *,
        branch_id: str | None = None,
        wrapper: RunContextWrapper[Any] | None = None,
    ) -> list[TResponseInputItem]:
        """Return the newest ``limit`` items of the branch in the order in which they were added.

        The default ``limit`` comes from the settings. A negative one means all. An item that cannot be read
        is left out, and does not count towards it.
        """
        if limit is not None:
            validation.query_number(limit, "limit", minimum=-MAX_BIGINT)
        wanted = resolve_session_limit(limit, self.session_settings)
        if wanted is not None and wanted < 0:
            wanted = None
        items = await self._log_of(branch_id).atail(wanted, skip_unreadable=True)
        return [item.payload for item in items]

    async def add_items(
        self, items: list[TResponseInputItem], *, wrapper: RunContextWrapper[Any] | None = None
    ) -> None:
        """Add items at the end of the branch, all or none. Raises `InvalidPayload` and `LimitExceeded`."""
        if not items:
            return
        try:
            await self._log.aappend(items, fencing_token=self.fencing_token)
        except InvalidPayload:
            plain = plain_json(items)
            if plain is None:
                raise
            await self._log.aappend(plain, fencing_token=self.fencing_token)

    async def pop_item(self, *, wrapper: RunContextWrapper[Any] | None = None) -> TResponseInputItem | None:
        """Delete the newest item of the branch and return it. No two callers get the same one. Newer items
        that cannot be read are deleted as well. Raises the error of `check_before_pop`, and then deletes
        nothing.
        """
        return await self._pop_item_with_validation()

    async def clear_session(self, *, wrapper: RunContextWrapper[Any] | None = None) -> None:
        """Delete all items of all branches, and switch to the branch ``main``.

        The session stays, with its usage and its metadata.
        """
        await self._log.aclear_all(fencing_token=self.fencing_token)
        self._log = self._log_of(_MAIN)

    # --- Branches ----------------------------------------------------------------------------------

    @property
    def branch_id(self) -> str:
        """The current branch."""
        return self._log.lane

    async def create_branch_from_turn(self, turn_number: int, branch_name: str | None = None) -> str:
        """Copy the items before a turn to a new branch, switch to it, and return its name. Raises
        `ValueError` if the current branch has no such turn, or if the name is blank or in use.
        """
        validation.query_number(turn_number, "turn_number", minimum=-MAX_BIGINT)
        if branch_name is not None and not lane_name(branch_name, "branch_name").strip():
            raise ValueError("A branch needs a name.")
        turns = await self._turns(None)
        if not 0 < turn_number <= len(turns):
            raise ValueError(f"Turn {turn_number} does not exist in branch {self.branch_id!r}.")
        name = branch_name or f"branch_from_turn_{turn_number}_{new_id()}"
        if name in (self.branch_id, _MAIN):
            raise ValueError(f"Branch {name!r} already exists.")
        try:
            await self._log.acopy_to(
                name, before=turns[turn_number - 1].position, fencing_token=self.fencing_token
            )
        except ConflictError as exc:
            raise ValueError(f"Branch {name!r} already exists.") from exc
        self._log = self._log_of(name)
        return name

    async def create_branch_from_content(self, search_term: str, branch_name: str | None = None) -> str:
        """Call `create_branch_from_turn` for the first turn whose user message has the text."""
        if branch_name is not None:
            lane_name(branch_name, "branch_name")
        for turn in await self.find_turns_by_content(search_term):
            return await self.create_branch_from_turn(turn["turn"], branch_name)
        raise ValueError("No turn has this text.")

    async def switch_to_branch(self, branch_id: str) -> None:
        """Switch to another branch. Raises `ValueError` for a branch without items, unless it is ``main``."""
        if lane_name(branch_id, "branch_id") != _MAIN and branch_id not in await self._log.alanes():
            raise ValueError(f"Branch {branch_id!r} does not exist.")
        self._log = self._log_of(branch_id)

    async def delete_branch(self, branch_id: str, force: bool = False) -> None:
        """Delete the items of a branch, never of ``main``. ``force`` is needed for the current branch."""
        validation.flag(force, "force")
        if branch_id == _MAIN:
            raise ValueError("The main branch cannot be deleted.")
        if branch_id == self.branch_id and not force:
            raise ValueError(f"Branch {branch_id!r} is the current one. Switch to another one, or use force.")
        if not await self._log.adelete_lane(branch_id, fencing_token=self.fencing_token):
            raise ValueError(f"Branch {branch_id!r} does not exist.")
        if branch_id == self.branch_id:
            self._log = self._log_of(_MAIN)

    async def list_branches(self) -> list[dict[str, Any]]:
        """Return ``branch_id``, ``message_count`` and ``is_current`` of each branch. Reads no items."""
        return [
            {"branch_id": name, "message_count": count, "is_current": name == self.branch_id}
            for name, count in (await self._log.alanes()).items()
        ]

    async def get_conversation_turns(self, branch_id: str | None = None) -> list[dict[str, Any]]:
        """Return ``turn``, ``content`` (cut), ``full_content`` and ``timestamp`` of each user message."""
        return [
            {
                "turn": number,
                "content": _preview(item.payload.get("content", "")),
                "full_content": item.payload.get("content", ""),
                "timestamp": item.created_at,
                "can_branch": True,
            }
            for number, item in enumerate(await self._turns(branch_id), 1)
        ]

    async def find_turns_by_content(
        self, search_term: str, branch_id: str | None = None
    ) -> list[dict[str, Any]]:
        """Return the turns of `get_conversation_turns` whose user message contains the text. As in the SDK,
        the case of ASCII letters does not matter.
        """
        text = re.escape(validation.instance(search_term, str, "search_term"))
        pattern = re.compile(text, re.IGNORECASE | re.ASCII)
        turns = await self.get_conversation_turns(branch_id)
        return [turn for turn in turns if any(map(pattern.search, _texts(turn["full_content"])))]

    async def get_conversation_by_turns(
        self, branch_id: str | None = None
    ) -> dict[int, list[dict[str, str | None]]]:
        """Return the ``type`` and the ``tool_name`` of the items of each turn. Items before the first user
        message belong to turn 0.
        """
        turns: dict[int, list[dict[str, str | None]]] = {}
        for turn, kind, tool in await self._kinds(branch_id):
            turns.setdefault(turn, []).append({"type": kind, "tool_name": tool})
        return turns

    async def get_tool_usage(self, branch_id: str | None = None) -> list[tuple[str, int, int]]:
        """Return the name of each tool, how often it was called in a turn, and the turn, ordered by turn."""
        items = await self._kinds(branch_id)
        calls = Counter((turn, tool or kind) for turn, kind, tool in items if kind in _CALLS)
        # The server runs a search for tools, and may store only its result.
        found = Counter((turn, str(tool)) for turn, kind, tool in items if kind == "tool_search_output")
        calls.update({key: count for key, count in found.items() if key not in calls})
        return [(tool, count, turn) for (turn, tool), count in sorted(calls.items())]

    # --- Usage -------------------------------------------------------------------------------------

    async def store_run_usage(self, result: RunResultBase) -> None:
        """Record the tokens of a run in the usage ledger, for the newest turn of the current branch.

        Adds one entry for each request to the model. Safe to repeat.
        """
        validation.instance(result, RunResultBase, "result")
        turns = await self._turns(None)
        anchor = turns[-1].position if turns else 0
        await self._usage.arecord(result, branch=self.branch_id, turn=len(turns), anchor=anchor)

    async def get_session_usage(self, branch_id: str | None = None) -> dict[str, int] | None:
        """Return requests, tokens and turns of all branches or of one, or ``None`` without usage."""
        branch = None if branch_id is None else lane_name(branch_id, "branch_id")
        return await self._usage.atotal(branch=branch)

    async def get_turn_usage(
        self, user_turn_number: int | None = None, branch_id: str | None = None
    ) -> list[dict[str, Any]] | dict[str, Any]:
        """Return the sums of one turn of a branch, or a list with the sums of each turn that has usage."""
        if user_turn_number is not None:
            validation.query_number(user_turn_number, "user_turn_number", minimum=-MAX_BIGINT)
        branch = self.branch_id if branch_id is None else lane_name(branch_id, "branch_id")
        turns = await self._usage.aby_turn(branch=branch or self.branch_id)
        if user_turn_number is None:
            return [{"user_turn_number": number, **sums} for number, sums in turns.items()]
        return turns.get(user_turn_number, {})

    # --- Optional methods that wrappers of the SDK use -----------------------------------------

    async def _pop_item_with_validation(
        self, validate: Callable[[TResponseInputItem], None] | None = None
    ) -> TResponseInputItem | None:
        """Call `pop_item`, but delete nothing if ``validate`` raises an error."""

        def is_valid(payload: Any) -> bool:
            for check in (self.check_before_pop, validate):
                if check is not None:
                    check(payload)
            return True

        item = await self._log.apop(is_valid, fencing_token=self.fencing_token)
        return None if item is None else item.payload

    async def _get_compaction_snapshot(
        self, limit: int, *, prune_prefix: Callable[[TResponseInputItem], bool] | None = None
    ) -> Any:
        """Return the newest items with their compare-and-swap, for ``OpenAIResponsesCompactionSession``.

        Return ``None`` if the SDK has no class for them, or if an item cannot be read. The compaction then
        reads all items, clears the session and adds the new ones, which is not atomic.
        """
        try:
            # Not public, but third-party sessions of the SDK work without it.
            from agents.memory.session import _CompactionSnapshot

            found = [item.payload for item in await self._log.atail(limit + 1)]
        except (ImportError, IntegrityFault):
            return None
        log, stored = self._log, found[-limit:]

        async def replace_suffix(start: int, output: list[Any]) -> bool:
            expected = stored[start:]
            return bool(expected) and await log.areplace_suffix(
                expected, output, prune=prune_prefix, fencing_token=self.fencing_token
            )

        return _CompactionSnapshot(copy_json(stored), len(found) <= limit, replace_suffix)

    async def _atomic_replace_items(self, items: list[TResponseInputItem]) -> bool:
        """Replace the items of the current branch in one transaction, for
        ``OpenAIResponsesCompactionSession``. Other branches stay.

        Return ``False`` in a subclass with its own ``get_items`` or ``add_items``, which may store items in
        another form. The SDK then clears the session and adds the new items.
        """
        kind = type(self)
        if kind.get_items is not DjangoSession.get_items or kind.add_items is not DjangoSession.add_items:
            return False
        try:
            return await self._log.areplace_suffix(None, items, fencing_token=self.fencing_token)
        except InvalidPayload:
            plain = plain_json(items)
            if plain is None:
                raise
            return await self._log.areplace_suffix(None, plain, fencing_token=self.fencing_token)

    def _log_of(self, branch_id: str | None) -> ItemLog:
        if branch_id is None:
            return self._log
        return ItemLog(session_id_for(self.session_id), branch_id, agent_type=AGENT_TYPE, **self._options)

    async def _kinds(self, branch_id: str | None) -> list[tuple[int, str, str | None]]:
        """Return the turn, the kind and the name of the tool of each item of a branch."""
        kinds, turn = [], 0
        for item in await self._log_of(branch_id).atail(skip_unreadable=True):
            kind, tool = _kind_of(item.payload)
            turn += kind == "user"
            kinds.append((turn, kind, tool))
        return kinds

    async def _turns(self, branch_id: str | None) -> list[StoredItem]:
        items = await self._log_of(branch_id).atail(skip_unreadable=True)
        return [item for item in items if type(item.payload) is dict and item.payload.get("role") == "user"]


def _kind_of(item: Any) -> tuple[str, str | None]:
    """Return the role of a message or the type of another item, and the name of its tool."""
    match item:
        case {"role": "user" | "assistant" as role}:
            return role, None
        case {"type": str(kind)} if kind:
            return kind, _tool_of(kind, item)
    return "other", None


def _tool_of(kind: str, item: Mapping[str, Any]) -> str | None:
    if kind in _NAMELESS_TOOLS:
        return "tool_search" if kind.startswith("tool_search") else kind
    group = item.get("server_label" if kind.startswith("mcp_") else "namespace")
    parts = [str(part) for part in (group, item.get("name")) if part]
    # The SDK puts a tool without a namespace into one of its own name.
    return ".".join(dict.fromkeys(parts)) or None


def _texts(content: Any) -> list[str]:
    """Return the texts that a person has written in a message, without the JSON around them."""
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return [text for text in texts if isinstance(text, str)]


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _preview(content: Any) -> str:
    text = _text(content)
    return f"{text[:_PREVIEW]}..." if len(text) > _PREVIEW else text
