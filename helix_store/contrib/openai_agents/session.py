"""The session of OpenAI Agents SDK in the project's database."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

from agents import RunContextWrapper, SessionSettings, TResponseInputItem
from agents.memory.session_settings import coerce_session_settings, resolve_session_limit
from agents.result import RunResultBase

from helix_store.adapters import session_id_for
from helix_store.contrib.openai_agents.usage import TurnUsage
from helix_store.core import validation
from helix_store.core.guards import guard
from helix_store.core.ids import new_id
from helix_store.core.limits import MAX_BIGINT
from helix_store.core.payloads import copy_json
from helix_store.core.types import UserId
from helix_store.exceptions import ConflictError, IntegrityFault, InvalidPayload
from helix_store.items import ItemLog, StoredItem
from helix_store.items.rules import item_key, lane_name

AGENT_TYPE: Final = "openai_agents"
_MAIN: Final = "main"
_PREVIEW: Final = 100


class DjangoSession:
    """A session for ``Runner.run(agent, input, session=DjangoSession("chat-1"))``.

    ``session_id`` may be any string: if it is not a valid session id, it gets a readable form with a digest.
    The first item creates the session, unless it exists; admin, usage, retention and erasure find it there.
    Every write is one transaction; if it is cancelled, the caller is told after it has ended. A write sets
    ``user_id`` as the user of a session without one, and raises `ConflictError` if the session belongs to
    another user. With a ``fencing_token``, a write raises `FencedOutError` if the session's lock has a larger
    one.

    ``limit`` in the settings is the number of newest items that a run reads; a negative one means all.

    Each branch of the conversation is a lane of the session. ``branch`` is the branch to begin with; the
    current one belongs to the object, not to the stored session. A turn begins with a user message. The calls
    on branches have the names of the SDK's ``AdvancedSQLiteSession``.
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
    ) -> None:
        self.session_id = session_id
        self.session_settings: SessionSettings | None = coerce_session_settings(session_settings or {})
        self.fencing_token = guard(fencing_token=fencing_token).fencing_token
        self._options: dict[str, Any] = {"using": using, "tenant": tenant, "user_id": user_id}
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
            plain = _plain(items)
            if plain is None:
                raise
            await self._log.aappend(plain, fencing_token=self.fencing_token)

    async def pop_item(self, *, wrapper: RunContextWrapper[Any] | None = None) -> TResponseInputItem | None:
        """Delete the newest item of the branch and return it. No two callers get the same one. Newer items
        that cannot be read are deleted as well.
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
        """Return the turns of `get_conversation_turns` whose user message contains the text."""
        validation.instance(search_term, str, "search_term")
        turns = await self.get_conversation_turns(branch_id)
        return [turn for turn in turns if search_term in _text(turn["full_content"])]

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
            if validate is not None:
                validate(payload)
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

    def _log_of(self, branch_id: str | None) -> ItemLog:
        if branch_id is None:
            return self._log
        return ItemLog(session_id_for(self.session_id), branch_id, agent_type=AGENT_TYPE, **self._options)

    async def _turns(self, branch_id: str | None) -> list[StoredItem]:
        items = await self._log_of(branch_id).atail(skip_unreadable=True)
        return [item for item in items if type(item.payload) is dict and item.payload.get("role") == "user"]


def _plain(items: list[Any]) -> list[Any] | None:
    """Return items with tuples, enumerations and similar values converted to JSON, or ``None``."""
    try:
        plain: list[Any] = json.loads(json.dumps(items, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        return None
    return plain


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _preview(content: Any) -> str:
    text = _text(content)
    return f"{text[:_PREVIEW]}..." if len(text) > _PREVIEW else text
