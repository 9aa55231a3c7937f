"""The admin, a redirect to it from the root, and a page on which an agent answers live."""

from __future__ import annotations

from django.contrib import admin
from django.urls import include, path
from django.views.generic import RedirectView

from example_project import views

urlpatterns = [
    path("", RedirectView.as_view(pattern_name="admin:index")),
    path("admin/", admin.site.urls),
    path("live/", views.ask_page, name="ask_page"),
    path("live/ask/", views.ask, name="ask"),
    path("live/<str:stream_id>/", views.live_page, name="live"),
    path("", include("helix_store.urls")),
]
