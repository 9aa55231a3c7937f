"""A project may unregister a model of the admin: the other pages then show its rows without links."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
from django.contrib import admin
from django.db.models import Model
from django.test.utils import override_settings
from django.urls import path

from helix_store.models import Checkpoint, Lock, Message, Run, Stream, UsageEntry
from tests.admin.conftest import Browser
from tests.admin.rows import write_session


@pytest.fixture(params=[Checkpoint, Lock, Message, Run, Stream, UsageEntry], ids=lambda model: model.__name__)
def unregistered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Model]]:
    model: type[Model] = request.param
    registered = dict(admin.site._registry)
    admin.site.unregister(model)
    urls = ModuleType("urls_without_a_model")
    urls.urlpatterns = [path("admin/", admin.site.urls)]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, urls.__name__, urls)
    with override_settings(ROOT_URLCONF=urls.__name__):
        yield model
    admin.site._registry = registered


@pytest.mark.thorough
def test_every_page_is_shown_without_links_to_a_model_that_is_not_registered(
    unregistered: type[Model], browser: Browser
) -> None:
    session = write_session(browser.database)
    pages = [
        *browser.sections_of(session).values(),
        browser.open("/admin/"),
        browser.open("/admin/helix_store/"),
    ]
    assert [page.status for page in pages] == [200] * len(pages)
    links = [str(attributes.get("href")) for page in pages for _, attributes in page.elements.started]
    assert [link for link in links if f"/{unregistered._meta.model_name}/" in link] == []
    assert "" not in links
