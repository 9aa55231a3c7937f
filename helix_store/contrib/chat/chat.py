"""One chat of a project, with its addresses. The views know only its driver: so imports have no cycle."""

from __future__ import annotations

from functools import cached_property

from django.urls import URLPattern, path

from helix_store.contrib.chat.driver import Driver
from helix_store.contrib.chat.views import Views

__all__ = ["Chat"]


class Chat(Driver):
    """A durable chat, for ``path("chat/", chat.urls)``.

    ``answer(turn, out)`` takes one turn of the agent. It is synchronous or a coroutine function. ``tenant``
    and ``owner`` are values or (async) functions of the request; by default, the owner is the primary key of
    the signed-in user, and everybody else gets 401. ``may_run(request)`` returns true, false (403) or seconds
    (429). ``runner(session_id, using, tenant)`` has `drive` called, by default in a thread of this process.
    ``title`` is a function of the first message.

    Example::

        def answer(turn, out):
            while turn.is_active:
                with turn.step() as step:
                    out.text("Hello!")
                    step.end_turn()

        urlpatterns = [path("chat/", Chat("support", answer).urls)]
    """

    @property
    def urls(self) -> tuple[list[URLPattern], str, str]:
        """The addresses of the chat, for ``path(…, chat.urls)``, in the namespace ``name``."""
        return self._patterns, "helix_store_chat", self.name

    @cached_property
    def _patterns(self) -> list[URLPattern]:
        views = Views(self)
        view = views.view
        thread = "threads/<str:thread>/"
        return [
            path("agui/", view(POST=views.agui), name="agui"),
            path("agui/<str:thread>/", view(GET=views.agui_thread), name="agui-thread"),
            path("ai/", view(POST=views.ai), name="ai"),
            path("ai/<str:thread>/stream", view(GET=views.ai_stream), name="ai-stream"),
            path("threads/", view(GET=views.threads), name="threads"),
            path(thread, view(GET=views.thread, PATCH=views.rename, DELETE=views.delete), name="thread"),
            path(f"{thread}stop/", view(POST=views.stop), name="stop"),
            path(f"{thread}posts/", view(POST=views.post), name="posts"),
            path(f"{thread}posts/<str:post>/", view(DELETE=views.withdraw), name="post"),
            path(f"{thread}calls/<str:call>/", view(POST=views.answer), name="call"),
        ]
