"""Conversations of adapters: functions that read an adapter's rows as messages.

With its tables, an adapter registers a `Conversation` in ``AppConfig.ready()``::

    register_conversation(MyConversation())

The admin's list and page of sessions and ``helix_sessions show`` then show its messages. If the adapter keeps
them in an item log, `helix_store.reports.ItemConversation` is all it needs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Protocol

from django.db.models import Model

from helix_store.core.transcript import ConversationMessage
from helix_store.engine.database import Database


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """The part of a conversation that a list shows: the number of its messages, and the newest one.

    ``is_partial`` means that the session has more than ``count`` messages. ``last`` is ``None`` if a list
    would have to read too much to find it.
    """

    count: int
    is_partial: bool = False
    last: ConversationMessage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationStep:
    """A step that led to the newest message. ``count`` is the number of messages after this step."""

    step_id: str
    name: str = ""
    step: int | None = None
    count: int | None = None
    at: datetime | None = None
    row: tuple[type[Any], int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationPage:
    """A page of a conversation's messages in order, and the number of all messages.

    ``is_partial`` means that there are older messages than the first of the ``total`` that an adapter counts.
    ``thread`` is the shown thread, one of the session's ``threads``, for frameworks that keep several in one
    session, such as branches and sub-agents. ``path`` lists the last steps that led to the newest message,
    newest first, for frameworks that store steps.
    """

    messages: tuple[ConversationMessage, ...]
    total: int
    is_partial: bool = False
    thread: str = ""
    threads: tuple[str, ...] = ()
    path: tuple[ConversationStep, ...] = ()


class Conversation(Protocol):
    """The functions that read one adapter's rows as messages. Both methods only read, but never all rows.

    ``name`` is the name of the framework, which is shown and must be unique. ``needs`` are the models whose
    rows are shown: people who may not view all of these models do not see the conversation.
    """

    @property
    def name(self) -> str: ...

    @property
    def needs(self) -> tuple[type[Model], ...]: ...

    def outlines(self, db: Database, keys: Collection[int]) -> Mapping[int, Outline]:
        """Return the conversations among the sessions with these keys, which may belong to several tenants.

        The number of statements must not depend on the number of keys. Count at most a few hundred messages.
        """

    def page(
        self, db: Database, key: int, *, first: int | None, limit: int, thread: str | None = None
    ) -> ConversationPage | None:
        """Return up to ``limit`` messages from the number ``first``, or the newest ones if it is ``None``.

        Return ``None`` if the session has no conversation of this adapter. Without ``thread``, or with an
        unknown one, show the main thread. If ``first`` is after the end, ``messages`` is empty.
        """


_conversations: Final[dict[str, Conversation]] = {}


def register_conversation(conversation: Conversation) -> None:
    """Register the functions that read an adapter's rows as messages.

    Call it in ``AppConfig.ready()``; safe to repeat.
    """
    _conversations[conversation.name] = conversation


def conversations() -> tuple[Conversation, ...]:
    """Return the registered conversations by name."""
    return tuple(_conversations[name] for name in sorted(_conversations))
