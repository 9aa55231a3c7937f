"""The pages of checkpoints, values and writes."""

from __future__ import annotations

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse

from helix_store.contrib.langgraph import DjangoSaver
from helix_store.contrib.langgraph.models import LangGraphCheckpoint, LangGraphValue, LangGraphWrite
from tests.frameworks.langgraph.graphs import config_of, put

pytestmark = pytest.mark.django_db


@pytest.fixture
def client() -> Client:
    client = Client()
    client.force_login(User.objects.create_superuser("ada"))
    saver = DjangoSaver()
    stored = put(saver, config_of("thread"), {"log": ["<b>said</b>"], "small": 1})
    saver.put_writes(stored, [("log", ["<b>written</b>"])], "task")
    return client


@pytest.mark.parametrize(
    ("model", "shown"),
    [
        (LangGraphCheckpoint, "&#x27;small&#x27;: 1"),
        (LangGraphValue, "&lt;b&gt;said&lt;/b&gt;"),
        (LangGraphWrite, "&lt;b&gt;written&lt;/b&gt;"),
    ],
)
def test_the_content_is_shown_as_plain_data(client: Client, model: type, shown: str) -> None:
    row = model._base_manager.get()  # type: ignore[attr-defined]
    name = f"admin:helix_store_langgraph_{model.__name__.lower()}"
    listed = client.get(reverse(f"{name}_changelist"))
    assert listed.status_code == 200
    assert shown not in listed.content.decode()
    page = client.get(reverse(f"{name}_change", args=[row.pk])).content.decode()
    assert shown in page
    assert "<b>said</b>" not in page


@pytest.mark.parametrize("kind", ["pickle", "msgpack+aes", "msgpack"])
def test_what_the_strict_serializer_cannot_read_is_not_shown(client: Client, kind: str) -> None:
    LangGraphValue._base_manager.update(type=kind, blob=b"\xc1secret")
    row = LangGraphValue._base_manager.get()
    page = client.get(reverse("admin:helix_store_langgraph_langgraphvalue_change", args=[row.pk]))
    assert "Only the application can read this." in page.content.decode()
    assert "secret" not in page.content.decode()
