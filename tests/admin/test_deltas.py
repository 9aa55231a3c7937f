"""States stored as deltas are shown whole, and bases are not shown."""

from __future__ import annotations

from typing import Any

import pytest

from helix_store.models import (
    Checkpoint,
    CheckpointKind,
    Session,
)
from tests.admin.conftest import Browser
from tests.admin.rows import store_of
from tests.database.delta_steps import write_step
from tests.factories import SessionFactory

BALLAST = {"ballast": "x" * 200}


@pytest.fixture
def session(browser: Browser) -> Any:
    return SessionFactory.create(using=browser.database.alias, tenant=browser.database.tenant)


def test_pages_show_the_state_that_a_delta_stands_for(browser: Browser, session: Session) -> None:
    write_step(session, {**BALLAST, "number": 1})
    delta = write_step(session, {**BALLAST, "number": 2.0})
    assert delta.base_id is not None
    shown = f'{{ "ballast": "{BALLAST["ballast"]}", "number": 2.0 }}'
    assert shown in browser.page_of(delta).text
    assert shown in browser.page_of(session, section="state").text


def test_a_delta_that_does_not_fit_is_shown_as_it_is_stored(browser: Browser, session: Session) -> None:
    base = write_step(session, {**BALLAST, "number": 1})
    delta = write_step(session, {**BALLAST, "number": 2.0})
    rows = Checkpoint.objects.using(browser.database.alias)
    for damage in ('{"ballast":', "[]"):
        rows.filter(pk=base.pk).update(payload=damage)
        _check_that_the_delta_is_shown(browser, session, delta)
    rows.filter(pk=base.pk).delete()
    _check_that_the_delta_is_shown(browser, session, delta)


def _check_that_the_delta_is_shown(browser: Browser, session: Session, delta: Checkpoint) -> None:
    pages = browser.page_of(delta), browser.page_of(session, section="state")
    assert [page.status for page in pages] == [200, 200]
    assert all('"set": { "number": 2.0 }' in page.text for page in pages)


def test_a_base_is_no_checkpoint_of_any_page(browser: Browser, session: Session) -> None:
    base = write_step(session, {**BALLAST, "number": 1})
    write_step(session, {**BALLAST, "number": 2})
    store_of(browser.database).prune_checkpoints(session.session_id, keep=1)
    base.refresh_from_db()
    assert base.kind == CheckpointKind.BASE
    assert "1 checkpoint" in browser.page_of(session, section="checkpoints").text
    assert browser.list_of(Checkpoint).row_count == 1
    assert browser.page_of(base).status == 302
