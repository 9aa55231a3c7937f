"""A root URLconf that includes the app's URLs below another include."""

from __future__ import annotations

from django.urls import include, path

_inner = [path("agents/<int:team>/", include("helix_store.urls"))]

urlpatterns = [path("", include(_inner))]
