"""The addresses of a chat."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.urls import URLPattern, path

from helix_store.contrib.chat.views import Views

if TYPE_CHECKING:
    from helix_store.contrib.chat.driver import Driver

__all__ = ["patterns_of"]


def patterns_of(chat: Driver) -> list[URLPattern]:
    views = Views(chat)
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
