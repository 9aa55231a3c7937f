"""An action that is added to the list of actions is offered by the admin and by the command."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from helix_store.actions import SESSION_ACTIONS
from helix_store.actions.sessions import Outcome, ReasonForm, SessionAction
from helix_store.admin import SessionAdmin
from helix_store.management.commands import helix_sessions
from helix_store.stores import DatabaseStateStore
from tests.admin.conftest import Browser
from tests.admin.rows import store_of
from tests.admin.test_operations import address, log_of, row_of, told
from tests.commands.running import run


class Praise(SessionAction):
    name = "praise"
    label = "Praise"
    form = ReasonForm
    help = "Note that a session did well."
    example = "trip-1 --reason 'found the cheapest flight'"
    options = {"--reason": {"help": "What it did well."}}

    def run(self, store: DatabaseStateStore, session_id: str, given: Mapping[str, Any]) -> Outcome:
        store.merge_custom_state(session_id, {"praise": given["reason"]})
        return Outcome(message=f"Praised: {given['reason']}", data={"session_id": session_id})


def test_one_class_gives_an_action_to_the_admin_and_the_command(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    praise = Praise()
    monkeypatch.setattr(SessionAdmin, "row_operations", (*SessionAdmin.row_operations, praise))
    monkeypatch.setattr(helix_sessions, "SESSION_ACTIONS", (*SESSION_ACTIONS, praise))
    store = store_of(browser.database)
    store.create_session("trip", agent_type="a")
    session = row_of(browser, "trip")

    assert address(session, "praise") in browser.page_of(session).html
    assert told(browser, address(session, "praise"), {"reason": "quick"}) == ["Praised: quick"]
    assert [message for _flag, _title, message in log_of(session)] == ["Praised: quick"]
    options = ["--reason", "cheap", "--tenant", store.tenant, "--format", "json"]
    ended = run(store.alias, "helix_sessions", "praise", "trip", *options)
    assert ended.data == {"tenant": store.tenant, "session_id": "trip"}
    state = store.load_state("trip")
    assert state is not None
    assert state.custom_state == {"praise": "cheap"}
