"""Settings of the server of `benchmarks.chat`: PostgreSQL with a pool of ten connections."""

from __future__ import annotations

from typing import Any

from example_project import settings as example

globals().update({name: value for name, value in vars(example).items() if name.isupper()})

INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "helix_store",
    "helix_store.contrib.chat",
]
MIDDLEWARE: list[str] = []
ROOT_URLCONF = "benchmarks.chat_site"
SECRET_KEY = "for-benchmarks-only"  # noqa: S105  nothing is signed with it
DEBUG = False
ALLOWED_HOSTS = ["*"]
HELIX_STORE: dict[str, Any] = {"CHAT_THREADS": example.env.int("CHAT_THREADS", default=30)}
