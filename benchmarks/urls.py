"""The admin, where `benchmarks.trace` answers a call."""

from __future__ import annotations

from django.contrib import admin
from django.urls import path

__all__ = ["urlpatterns"]

urlpatterns = [path("admin/", admin.site.urls)]
