"""The admin of a project with ``USE_TZ = False``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.test import override_settings

from tests.admin.conftest import Browser
from tests.admin.rows import MODELS, write_session
from tests.databases import close_connections


@pytest.fixture(autouse=True)
def without_time_zones() -> Iterator[None]:
    close_connections()
    with override_settings(USE_TZ=False, TIME_ZONE="Asia/Tokyo"):
        yield
        close_connections()


@pytest.mark.thorough
def test_every_list_and_page_opens(browser: Browser) -> None:
    session = write_session(browser.database, expires_at=2_000_000_000_000)
    for model in MODELS:
        page = browser.list_of(model)
        assert (page.status, page.row_count) == (200, 1), model
        assert browser.page_of(model._base_manager.using(browser.database.alias).get()).status == 200, model
    assert browser.page_of(session).status == 200
