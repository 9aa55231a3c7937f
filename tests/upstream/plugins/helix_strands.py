"""A pytest plugin for the tests of Strands: the repository in them is ours.

The folder of upstream's tests is named ``tests`` too, so that nothing of ours can be imported from there.
"""

from __future__ import annotations

import json
import os
import uuid
from typing import Any

import django
import pytest
from django.conf import settings

settings.configure(
    SECRET_KEY="for-tests-only",
    DATABASES={"default": json.loads(os.environ["HELIX_UPSTREAM_DATABASE"])},
    INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth", "helix_store"],
    USE_TZ=True,
)
django.setup()


def pytest_sessionstart(session: pytest.Session) -> None:
    from django.core.management import call_command

    call_command("migrate", verbosity=0)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """The module of the tests makes an empty repository for each: by this class, which replaces its own."""
    from helix_store.contrib.strands import DjangoSessionRepository

    class EmptyRepository(DjangoSessionRepository):
        def __init__(self) -> None:
            super().__init__(tenant=uuid.uuid4().hex)

    for item in items:
        item.module.MockedSessionRepository = EmptyRepository
