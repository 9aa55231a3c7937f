"""The pages of conversations and entries: read-only, and without payloads in lists."""

from __future__ import annotations

from asgiref.sync import async_to_sync
from django.contrib.auth.models import Permission
from pydantic_ai.conversation import Conversation as Talk
from pydantic_ai.messages import ModelRequest, ModelResponse, ToolCallPart, UserPromptPart

from helix_store.contrib.pydantic_ai.models import Conversation, ConversationEntry
from tests.admin.conftest import Browser, browser, visitor
from tests.frameworks.pydantic_ai.conversations import forked, saved, store_of

__all__ = ["browser", "visitor"]


def _conversation(browser: Browser, name: str) -> Conversation:
    return Conversation.objects.using(browser.database.alias).get(session__session_id=name)


def test_the_list_reads_no_record(browser: Browser) -> None:
    saved(browser.database, "trip", "<b>hello</b>", scope="ada")
    forked(browser.database, "trip", "fork")
    page = browser.list_of(Conversation)
    assert page.row_count == 2
    assert "trip" in page.text
    assert "ada" in page.text
    assert [sql for sql in page.statements if '"document"' in sql] == []


def test_a_conversation_shows_its_record_and_leads_to_its_entries(browser: Browser) -> None:
    saved(browser.database, "trip", "one", "two", scope="ada")
    saved(browser.database, "other", "three")
    page = browser.page_of(_conversation(browser, "trip"))
    assert (page.status, "conversation_id" in page.text) == (200, True)
    (address,) = [
        attributes["href"]
        for name, attributes in page.elements.started
        if name == "a" and "family__exact" in (attributes.get("href") or "")
    ]
    assert address is not None
    entries = browser.open(address)
    assert entries.row_count == 4
    assert "answer to two" in entries.text
    assert "three" not in entries.text


def test_a_preview_has_texts_and_tools_and_is_shown_as_text(browser: Browser) -> None:
    talk = Talk(conversation_id="trip")
    talk.messages = [
        ModelRequest(
            parts=[UserPromptPart(content="<script>1</script> \udc00"), UserPromptPart(content=["a"])]
        ),
        ModelResponse(parts=[ToolCallPart("book", {"a": 1}, "1")]),
        ModelRequest(parts=[UserPromptPart(content="x" * 50_000)]),
    ]
    async_to_sync(store_of(browser.database).save)(talk)
    page = browser.list_of(ConversationEntry)
    assert "<script>1" not in page.html
    assert "&lt;script&gt;1&lt;/script&gt;" in page.html
    assert "→ book" in page.text
    assert "x" * 100 in page.text
    assert "x" * 1_000 not in page.text
    for entry in ConversationEntry.objects.using(browser.database.alias):
        assert browser.page_of(entry).status == 200


def test_a_damaged_payload_breaks_no_page(browser: Browser) -> None:
    saved(browser.database, "trip", "one")
    alias = browser.database.alias
    ConversationEntry.objects.using(alias).update(payload="{")
    Conversation.objects.using(alias).update(document="no JSON")
    assert "cannot be read" in browser.list_of(ConversationEntry).text
    assert browser.page_of(ConversationEntry.objects.using(alias).all()[0]).status == 200
    assert browser.page_of(_conversation(browser, "trip")).status == 200


def test_nothing_can_be_changed_and_pages_need_a_permission(visitor: Browser) -> None:
    saved(visitor.database, "trip", "one")
    visitor.sign_in()
    assert visitor.list_of(Conversation).status == 403
    visitor.sign_in(Permission.objects.get(codename="view_conversation"))
    conversation = _conversation(visitor, "trip")
    assert visitor.page_of(conversation).status == 200
    assert visitor.list_of(ConversationEntry).status == 403
    response = visitor.client.post(f"/admin/helix_store_pydantic_ai/conversation/{conversation.pk}/delete/")
    assert response.status_code == 403
