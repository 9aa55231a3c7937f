"""The admin, a redirect to it from the root, a page with a live answer, and a chat with an agent."""

from __future__ import annotations

from django.contrib import admin
from django.urls import include, path
from django.views.generic import RedirectView

from example_project import views
from example_project.chat import chat, chat_page

urlpatterns = [
    path("", RedirectView.as_view(pattern_name="admin:index")),
    path("admin/", admin.site.urls),
    path("live/", views.ask_page, name="ask_page"),
    path("live/ask/", views.ask, name="ask"),
    path("live/<str:stream_id>/", views.live_page, name="live"),
    path("chat/", chat_page, name="new_chat"),
    path("chat/api/", chat.urls),
    path("chat/<str:thread>/", chat_page, name="chat"),
    path("", include("helix_store.urls")),
]
