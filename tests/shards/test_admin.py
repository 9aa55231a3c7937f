"""The admin of several databases: a site for each, and every link stays in its site."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any
from urllib.parse import urljoin

import pytest
from django.contrib import admin
from django.contrib.auth.models import User
from django.test import Client, override_settings
from django.urls import include, path
from django.utils import translation
from django.utils.translation import gettext

from helix_store.admin import database_sites
from helix_store.models import Session
from helix_store.stores import DatabaseStateStore
from tests.admin.conftest import Page
from tests.shards.conftest import Pair


class Sites:
    """A browser in a project that has a site for each database."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.client = Client()
        self.user = User.objects.create_user("user-of-sites", is_staff=True, is_superuser=True)
        self.client.force_login(self.user)

    def open(self, url: str) -> Page:
        response = self.client.get(url)
        return Page(response.status_code, response.content.decode())

    def list_of(self, alias: str) -> Page:
        return self.open(f"/databases/{alias}/helix_store/session/?tenant={self.pair.tenant}")

    def key_of(self, alias: str) -> int:
        return Session.objects.using(alias).get(tenant=self.pair.tenant).pk


def urlconf(urls: list[Any]) -> ModuleType:
    module = ModuleType("urls_of_a_project")
    module.urlpatterns = urls  # type: ignore[attr-defined]  # as the module of a project has
    return module


@pytest.fixture
def sites(pair: Pair) -> Iterator[Sites]:
    for alias in pair.aliases:
        store = DatabaseStateStore(alias, tenant=pair.tenant)
        store.create_session(f"in-{alias}", agent_type="agent")
        store.append_messages(f"in-{alias}", [{"role": "user", "content": f"hello {alias}"}])
    urls = [path("databases/", include(database_sites())), path("admin/", admin.site.urls)]
    with override_settings(ROOT_URLCONF=urlconf(urls)):
        browser = Sites(pair)
        yield browser
        browser.user.delete()


def links_of(page: Page, address: str) -> set[str]:
    return {
        urljoin(address, str(values["href"]))
        for tag, values in page.elements.started
        if tag == "a" and values.get("href")
    }


def test_each_site_shows_its_database(sites: Sites) -> None:
    for alias, other in (sites.pair.aliases, sites.pair.aliases[::-1]):
        page = sites.list_of(alias)
        assert page.status == 200
        assert f"in-{alias}" in page.text
        assert f"in-{other}" not in page.text
        child = sites.open(
            f"/databases/{alias}/helix_store/message/?session__id__exact={sites.key_of(alias)}"
        )
        assert (child.status, child.row_count) == (200, 1)
        assert f"in-{alias}" in child.text


@pytest.mark.parametrize("page", ["", "helix_store/", "helix_store/session/", "helix_store/lock/", "row"])
def test_every_link_stays_in_its_site(sites: Sites, page: str) -> None:
    alias = sites.pair.second
    if page == "row":
        page = f"helix_store/session/{sites.key_of(alias)}/change/"
    address = f"/databases/{alias}/{page}"
    shown = sites.open(address)
    assert shown.status == 200
    links = {link for link in links_of(shown, address) if "/helix_store/" in link}
    stays = {link for link in links if link.startswith(f"/databases/{alias}/")}
    assert stays
    # The switch alone leads elsewhere: to the same page.
    assert all(link.startswith("/databases/") and link.endswith(f"/{page}") for link in links - stays)


@pytest.mark.parametrize("page", ["", "helix_store/", "helix_store/session/"])
def test_the_switch_leads_to_the_same_page_of_the_other_database(sites: Sites, page: str) -> None:
    first, second = sites.pair.aliases
    switched = f"/databases/{first}/{page}"
    address = f"/databases/{second}/{page}"
    assert switched in links_of(sites.open(address), address)


def test_the_switch_names_where_one_is(sites: Sites) -> None:
    first, second = (f"/databases/{alias}/helix_store/session/" for alias in sites.pair.aliases)
    page = sites.list_of(sites.pair.second)
    current = [
        values["href"] for tag, values in page.elements.started if "aria-current" in values and tag == "a"
    ]
    assert second in current
    assert first not in current
    assert f'href="{first}"' in page.html
    assert f'href="{first}"' in sites.open("/admin/helix_store/session/").html
    with translation.override("de"):
        assert gettext("Databases") == "Datenbanken"


def test_without_such_sites_there_is_no_switch(sites: Sites) -> None:
    with override_settings(ROOT_URLCONF=urlconf([path("admin/", admin.site.urls)])):
        assert "helix-databases" not in sites.open("/admin/helix_store/session/").html


def test_an_operation_writes_to_the_database_of_its_site(sites: Sites) -> None:
    alias = sites.pair.second
    address = f"/databases/{alias}/helix_store/session/{sites.key_of(alias)}/operation/interrupt/"
    response = sites.client.post(address, {"confirmed": "yes"})
    assert response.status_code == 302
    assert response.headers["Location"].startswith(f"/databases/{alias}/")
    interrupted = [
        DatabaseStateStore(each, tenant=sites.pair.tenant).check_interrupt(f"in-{each}") is not None
        for each in sites.pair.aliases
    ]
    assert interrupted == [False, True]


def test_an_unknown_database_is_not_found(sites: Sites) -> None:
    assert sites.open("/databases/nowhere/helix_store/session/").status == 404


def test_a_site_asks_for_the_permissions_of_the_admin(sites: Sites) -> None:
    sites.user.is_superuser = False
    sites.user.save()
    assert sites.list_of(sites.pair.second).status == 403
    sites.client.logout()
    assert sites.list_of(sites.pair.second).status == 302
