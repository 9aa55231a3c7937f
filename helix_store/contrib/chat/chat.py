"""One chat of a project."""

from __future__ import annotations

from functools import cached_property

from django.urls import URLPattern

from helix_store.contrib.chat.driver import Driver
from helix_store.contrib.chat.urls import patterns_of

__all__ = ["Chat"]


class Chat(Driver):
    """A durable chat, for ``path("chat/", chat.urls)``.

    ``answer(turn, out)`` takes one turn of the agent. It is synchronous or a coroutine function. ``tenant``
    and ``owner`` are values or (async) functions of the request; by default, the owner is the primary key of
    the signed-in user, and everybody else gets 401. ``may_run(request)`` returns true, false (403) or seconds
    (429). ``runner(session_id, using, tenant)`` has `drive` called, by default in a thread of this process.
    ``title`` is a function of the first message.
    """

    @cached_property
    def _patterns(self) -> list[URLPattern]:
        return patterns_of(self)

    @property
    def urls(self) -> tuple[list[URLPattern], str, str]:
        """The addresses of the chat, for ``path(…, chat.urls)``, in the namespace ``name``."""
        return self._patterns, "helix_store_chat", self.name
