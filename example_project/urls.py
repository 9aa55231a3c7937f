"""The admin, a redirect to it from the root, a page with a live answer, and a chat with an agent."""

from __future__ import annotations

from django.contrib import admin
from django.urls import include, path
from django.views.generic import RedirectView

from example_project import views
from example_project.chat import views as chat

urlpatterns = [
    path("", RedirectView.as_view(pattern_name="admin:index")),
    path("admin/", admin.site.urls),
    path("live/", views.ask_page, name="ask_page"),
    path("live/ask/", views.ask, name="ask"),
    path("live/<str:stream_id>/", views.live_page, name="live"),
    path("chat/", chat.begin, name="new_chat"),
    path("chat/<str:session_id>/", chat.chat, name="chat"),
    path("chat/<str:session_id>/withdraw/", chat.withdraw, name="withdraw"),
    path("chat/<str:session_id>/stop/", chat.stop, name="stop"),
    path("chat/<str:session_id>/decide/", chat.decide, name="decide"),
    path("chat/<str:session_id>/go-on/", chat.go_on, name="go_on"),
    path("", include("helix_store.urls")),
]
