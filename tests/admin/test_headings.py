"""Each page of the app's own has one heading, also under themes whose base template shows no title."""

from __future__ import annotations

from typing import Any, Final

import pytest
from django.conf import settings
from django.test.utils import override_settings
from django.urls import reverse

from helix_store.models import Budget
from helix_store.stores import DatabaseBudgetStore
from tests.admin.conftest import Browser, Page
from tests.admin.rows import store_of
from tests.admin.test_operations import address, row_of
from tests.cells import for_each

BASES: Final = {
    "leaves the title out": "{% block content %}{% endblock %}",
    "has an empty heading for the title": (
        "<h3>{% block content_title %}{% endblock %}</h3>{% block content %}{% endblock %}"
    ),
}


def _headings(page: Page) -> list[str]:
    """The texts of the ``h1`` elements of a page."""
    assert page.status == 200
    return [part.partition(">")[2].partition("</h1>")[0] for part in page.html.split("<h1")[1:]]


@pytest.mark.thorough
@for_each("base", [None, *BASES.values()], ids=["is Django's own", *BASES])
def test_a_page_has_one_heading_if_the_base_template(browser: Browser, base: str | None) -> None:
    store_of(browser.database).create_session("s", agent_type="a", title="Book a trip")
    budgets = DatabaseBudgetStore(browser.database.alias, tenant=browser.database.tenant)
    budgets.set_budget("Trips", scope="tenant", period="month", limit_usd=5)
    budget = Budget.objects.using(browser.database.alias).get()
    session = row_of(browser)
    theme: Any = settings.TEMPLATES
    if base is not None:
        loaders = [
            ("django.template.loaders.locmem.Loader", {"admin/base.html": base}),
            "django.template.loaders.app_directories.Loader",
        ]
        options = {**theme[0]["OPTIONS"], "loaders": loaders}
        theme = [{**theme[0], "APP_DIRS": False, "OPTIONS": options}]
    with override_settings(TEMPLATES=theme):
        pages = {
            address(session, "delete-session"): "Delete",
            reverse(
                "admin:helix_store_session_table_operation", args=["clean-up"]
            ): "Clean up expired sessions",
            reverse("admin:helix_store_usageentry_report"): "Usage",
            reverse("admin:helix_store_session_change", args=[session.pk]): "Book a trip",
            reverse("admin:helix_store_budget_change", args=[budget.pk]): "Trips",
        }
        assert {url: _headings(browser.open(url)) for url in pages} == {
            url: [heading] for url, heading in pages.items()
        }
