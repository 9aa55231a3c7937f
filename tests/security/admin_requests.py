"""Addresses of the admin's pages, and what they ask the database."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db.models import Model
from django.urls import reverse

from helix_store.models import Session
from tests.admin.conftest import Browser

__all__ = ["address_of", "statements"]


def address_of(model: Model | type[Model], view: str, *arguments: Any) -> str:
    return reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_{view}", args=arguments)


@contextmanager
def statements(browser: Browser) -> Iterator[list[str]]:
    """The statements about tables of the app."""
    sent: list[str] = []

    def note(execute: Any, sql: str, *rest: Any) -> Any:
        if Session._meta.db_table.removesuffix("session") in sql:
            sent.append(sql)
        return execute(sql, *rest)

    with browser.database.connection.execute_wrapper(note):
        yield sent
