"""Branches of a conversation, each a lane of the session, and the usage of their turns.

A turn begins with a user message. The calls have the names of the SDK's ``AdvancedSQLiteSession``.
"""

from __future__ import annotations

import json
from typing import Any, Final

from agents.result import RunResultBase

from helix_store.contrib.openai_agents.usage import TurnUsage
from helix_store.core import validation
from helix_store.core.ids import new_id
from helix_store.core.limits import MAX_BIGINT
from helix_store.exceptions import ConflictError
from helix_store.items import ItemLog, StoredItem
from helix_store.items.rules import lane_name

__all__ = ["Branches"]

_MAIN: Final = "main"
_PREVIEW: Final = 100


class Branches:
    """The branches of a session. The current branch belongs to the object, not to the stored session."""

    fencing_token: int | None

    def __init__(self, log: ItemLog, *, using: str | None) -> None:
        self._log = log
        self._using = using
        self._usage = TurnUsage(log.session_id, using=using, tenant=log.tenant, user_id=log.user_id)

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
            self._go_to_main()

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

        One entry for each request to the model. Safe to repeat.
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

    # --- Inside ------------------------------------------------------------------------------------

    def _log_of(self, branch_id: str | None) -> ItemLog:
        if branch_id is None or branch_id == self.branch_id:
            return self._log
        return ItemLog(
            self._log.session_id,
            branch_id,
            using=self._using,
            tenant=self._log.tenant,
            agent_type=self._log.agent_type,
            user_id=self._log.user_id,
        )

    def _go_to_main(self) -> None:
        self._log = self._log_of(_MAIN)

    async def _turns(self, branch_id: str | None) -> list[StoredItem]:
        items = await self._log_of(branch_id).atail(skip_unreadable=True)
        return [item for item in items if type(item.payload) is dict and item.payload.get("role") == "user"]


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _preview(content: Any) -> str:
    text = _text(content)
    return f"{text[:_PREVIEW]}..." if len(text) > _PREVIEW else text
