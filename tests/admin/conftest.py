"""A signed-in browser whose pages show one of the databases, and a session with everything in it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from html.parser import HTMLParser
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connections
from django.db.models import Model
from django.test import Client
from django.test.utils import CaptureQueriesContext, override_settings
from django.urls import reverse

from helix_store.admin.sections import SECTIONS
from helix_store.models import Session
from tests.databases import CommittedDatabase, delete_all_rows


class EverythingOn:
    """Routes every model to one database, and lets the app have no other one."""

    def __init__(self, alias: str) -> None:
        self.alias = alias

    def db_for_read(self, model: type[Model], **hints: Any) -> str:
        return self.alias

    def db_for_write(self, model: type[Model], **hints: Any) -> str:
        return self.alias

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool:
        return db == self.alias


class Elements(HTMLParser):
    """The elements of a page with their attributes, and its text with a space where an element begins."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.started.append((tag, dict(attrs)))
        self.text += " "

    def handle_data(self, data: str) -> None:
        self.text += data


@dataclass
class Page:
    status: int
    html: str
    statements: list[str] = field(default_factory=list)

    @cached_property
    def elements(self) -> Elements:
        elements = Elements()
        elements.feed(self.html)
        return elements

    @cached_property
    def text(self) -> str:
        return " ".join(self.elements.text.split())

    @property
    def row_count(self) -> int:
        """Rows of a list, without its head."""
        _, _, table = self.html.partition('id="result_list"')
        return max(0, table.partition("</table>")[0].count("<tr>") - 1)


@dataclass
class Browser:
    """The admin as one user sees it."""

    database: CommittedDatabase
    client: Client = field(default_factory=Client)

    def sign_in(self, *permissions: Any, superuser: bool = False) -> User:
        user = User.objects.create_user(
            f"user-{uuid.uuid4().hex}", is_staff=True, is_superuser=superuser, password=None
        )
        user.user_permissions.set(permissions)
        self.client.force_login(user)
        return user

    def open(self, url: str, **query: Any) -> Page:
        connection = connections[self.database.alias]
        # Django keeps the newest 9,000 statements, and warns of a full log.
        connection.queries_log.clear()
        with CaptureQueriesContext(connection) as captured:
            response = self.client.get(url, query)
        return Page(
            response.status_code,
            response.content.decode(),
            [query["sql"] for query in captured.captured_queries],
        )

    def list_of(self, model: type[Model], **query: Any) -> Page:
        return self.open(_url(model, "changelist"), **query)

    def page_of(self, row: Model, **query: Any) -> Page:
        return self.open(_url(type(row), "change", row.pk), **query)

    def sections_of(self, session: Session) -> dict[str, Page]:
        """The page of a session with each of its sections, by their names."""
        return {section.name: self.page_of(session, section=section.name) for section in SECTIONS}


def _url(model: type[Model], view: str, *arguments: Any) -> str:
    return reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_{view}", args=arguments)


@contextmanager
def browser_on(database: CommittedDatabase) -> Iterator[Browser]:
    with override_settings(DATABASE_ROUTERS=[EverythingOn(database.alias)]):
        yield Browser(database)
        User.objects.filter(username__startswith="user-").delete()


@pytest.fixture
def visitor(empty_db: CommittedDatabase) -> Iterator[Browser]:
    """A browser on each database in turn; nobody is signed in, and there are no rows yet."""
    with browser_on(empty_db) as browser:
        yield browser


@pytest.fixture
def browser(visitor: Browser) -> Browser:
    """A browser in which a superuser is signed in."""
    visitor.sign_in(superuser=True)
    return visitor


@pytest.fixture
def sqlite_browser(sqlite_db: CommittedDatabase) -> Iterator[Browser]:
    """``browser`` on SQLite alone."""
    delete_all_rows(sqlite_db.alias)
    with browser_on(sqlite_db) as browser:
        browser.sign_in(superuser=True)
        yield browser
        # What these tests leave is damaged, and other tests look at every row.
        delete_all_rows(sqlite_db.alias)
