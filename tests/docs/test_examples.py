"""The Python examples of the README and the docs run as they are printed, in order, page by page.

A block whose first line is a comment with a file's name is shown but not run. ``test_projects`` follows
the pages that build a project.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.contrib.auth.models import User
from django.db import DEFAULT_DB_ALIAS
from pytest_django import DjangoDbBlocker

from helix_store.contrib.langgraph import catalogue
from tests.databases import ALIASES, close_connections, delete_all_rows
from tests.test_layout import NOT_IN_DEV

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(?!# [\w/]+\.py\n)(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def default_database(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[None]:
    """All databases, emptied; in the default one there are no users, neither before nor after."""
    with django_db_blocker.unblock():
        users = User.objects.using(DEFAULT_DB_ALIAS)
        for alias in ALIASES.values():
            delete_all_rows(alias)
        users.all().delete()
        try:
            yield
        finally:
            users.all().delete()
            close_connections()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_examples_of_a_page_run(
    page: Path, default_database: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(NOT_IN_DEV.get(f"helix_store.contrib.{page.stem.replace('-', '_')}", "django"))
    # An example registers a type for the whole process; the tests after it must not find it.
    monkeypatch.setattr(catalogue, "_registered", set(catalogue._registered))
    namespace: dict[str, object] = {"__name__": f"example_of_{page.stem}"}
    text = page.read_text()
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start(1))
        # Without what this module imports from __future__: a reader's annotations are evaluated.
        code = compile("\n" * line + block[1], str(page), "exec", dont_inherit=True)
        try:
            exec(code, namespace)  # noqa: S102  our own documentation
        except Exception as error:
            numbers = [
                number
                for frame, number in traceback.walk_tb(error.__traceback__)
                if frame.f_code.co_filename == str(page)
            ]
            number = numbers[-1] if numbers else line + 1
            statement = text.splitlines()[number - 1].strip()
            raise AssertionError(f"line {number}: {statement}: {type(error).__name__}: {error}") from error
