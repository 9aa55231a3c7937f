"""The pages of runs of OpenAI Agents SDK that wait for an approval."""

from __future__ import annotations

from helix_store.contrib.openai_agents import RunStateStore
from helix_store.contrib.openai_agents.models import OpenAIRunState
from tests.admin.conftest import Browser

SECRET = "not for everybody"


def test_the_pages_show_whose_a_run_is_and_not_its_text(browser: Browser) -> None:
    states = RunStateStore(browser.database.alias, tenant=browser.database.tenant)
    state_id = states.save("chat", f'{{"key": "{SECRET}"}}', owner="alice")
    row = OpenAIRunState._base_manager.using(browser.database.alias).get(state_id=state_id)
    for page in (browser.list_of(OpenAIRunState), browser.page_of(row)):
        assert page.status == 200
        assert state_id in page.text
        assert "alice" in page.text
        assert SECRET not in page.text
        assert not any("payload" in statement for statement in page.statements)
