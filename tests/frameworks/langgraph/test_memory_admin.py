"""The pages of long-term memory: by namespace, and without values in the list."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from django.contrib.auth.models import Permission

from helix_store.contrib.langgraph import DjangoStore
from helix_store.contrib.langgraph.models import LangGraphMemory
from tests.admin.conftest import Browser, browser, visitor
from tests.databases import CommittedDatabase

__all__ = ["browser", "visitor"]


def put(database: CommittedDatabase, namespace: tuple[str, ...], key: str, value: Any = None) -> None:
    store = DjangoStore(using=database.alias, tenant=database.tenant)
    store.put(namespace, key, value or {"food": f"<b>{key}</b>"})


def memories(database: CommittedDatabase) -> Any:
    return LangGraphMemory.objects.using(database.alias).filter(tenant=database.tenant)


def test_the_list_is_in_the_order_of_namespaces_and_reads_no_value(browser: Browser) -> None:
    for user, key in [("ada", "size"), ("bob", "diet"), ("ada", "diet")]:
        put(browser.database, ("users", user), key)
    page = browser.list_of(LangGraphMemory)
    assert page.row_count == 3
    assert [word for word in page.text.split() if word in ("users.ada", "users.bob", "diet", "size")] == [
        *("diet", "users.ada"),
        *("size", "users.ada"),
        *("diet", "users.bob"),
    ]
    assert [sql for sql in page.statements if '"value"' in sql] == []


def test_the_list_asks_the_same_for_many_memories(browser: Browser) -> None:
    put(browser.database, ("users",), "first")
    few = browser.list_of(LangGraphMemory)
    for number in range(12):
        put(browser.database, ("users",), f"more-{number}")
    many = browser.list_of(LangGraphMemory)
    assert many.row_count == 13
    assert len(many.statements) == len(few.statements)


def test_a_namespace_leads_to_its_memories_of_the_tenant(browser: Browser) -> None:
    put(browser.database, ("users", "ada"), "diet")
    put(browser.database, ("users", "ada", "trips"), "kyoto")
    DjangoStore(using=browser.database.alias, tenant="another").put(("users", "ada"), "theirs", {"a": 1})
    page = browser.page_of(memories(browser.database).get(key="diet"))
    (address,) = {
        attributes["href"]
        for tag, attributes in page.elements.started
        if tag == "a" and "namespace__exact" in (attributes.get("href") or "")
    }
    assert address is not None
    found = browser.open(address)
    assert found.row_count == 1
    assert "diet" in found.text


def test_a_page_shows_the_value_as_text(browser: Browser) -> None:
    put(browser.database, ("users", "ada"), "diet")
    page = browser.page_of(memories(browser.database).get())
    assert page.status == 200
    assert "Key: diet" in page.text
    assert "&lt;b&gt;diet&lt;/b&gt;" in page.html
    assert "<b>diet" not in page.html


def test_a_value_that_is_too_long_is_not_read(browser: Browser) -> None:
    put(browser.database, ("users", "ada"), "diary", {"text": "x" * 300_000})
    page = browser.page_of(memories(browser.database).get())
    assert "Too long to be shown." in page.text
    assert "xxx" not in page.html
    assert [sql for sql in page.statements if '"value"' in sql] == []


def test_a_damaged_value_breaks_no_page(browser: Browser) -> None:
    put(browser.database, ("users", "ada"), "diet")
    memories(browser.database).update(value="{")
    assert browser.list_of(LangGraphMemory).status == 200
    assert "cannot be read" in browser.page_of(memories(browser.database).get()).text


def test_an_expired_memory_is_marked(browser: Browser) -> None:
    put(browser.database, ("users", "ada"), "diet")
    assert "expired" not in browser.list_of(LangGraphMemory).text
    memories(browser.database).update(expires_at=datetime(2001, 6, 1, tzinfo=UTC))
    assert "2001" in browser.list_of(LangGraphMemory).text
    assert "expired" in browser.list_of(LangGraphMemory).text


def test_nothing_can_be_changed_and_the_pages_need_a_permission(visitor: Browser) -> None:
    put(visitor.database, ("users", "ada"), "diet")
    memory = memories(visitor.database).get()
    visitor.sign_in()
    assert (visitor.list_of(LangGraphMemory).status, visitor.page_of(memory).status) == (403, 403)
    visitor.sign_in(Permission.objects.get(codename="view_langgraphmemory"))
    assert (visitor.list_of(LangGraphMemory).status, visitor.page_of(memory).status) == (200, 200)
    address = f"/admin/helix_store_langgraph/langgraphmemory/{memory.pk}/"
    for ending in ("delete/", "change/"):
        assert visitor.client.post(address + ending, {"value": "{}"}).status_code == 403
    assert memories(visitor.database).get().updated_at == memory.updated_at
