"""The pages of checkpoints, values and writes."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

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
        (LangGraphCheckpoint, "&quot;small&quot;: 1"),
        (LangGraphValue, "&lt;b&gt;said&lt;/b&gt;"),
        (LangGraphWrite, "&lt;b&gt;written&lt;/b&gt;"),
    ],
)
def test_the_content_is_shown_as_plain_data(client: Client, model: type, shown: str) -> None:
    row = model._base_manager.latest("pk")  # type: ignore[attr-defined]
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
    row = LangGraphValue._base_manager.latest("pk")
    page = client.get(reverse("admin:helix_store_langgraph_langgraphvalue_change", args=[row.pk]))
    assert "Only the application can read this." in page.content.decode()
    assert "secret" not in page.content.decode()


def test_a_list_shows_a_version_without_the_zeros_before_it(client: Client) -> None:
    row = LangGraphValue._base_manager.latest("pk")
    row.version = f"{'0' * 31}7.25"
    LangGraphValue._base_manager.filter(pk=row.pk).update(version=row.version)
    listed = client.get(reverse("admin:helix_store_langgraph_langgraphvalue_changelist")).content.decode()
    assert ">7.25<" in listed
    assert row.version not in listed
    page = client.get(reverse("admin:helix_store_langgraph_langgraphvalue_change", args=[row.pk]))
    assert row.version in page.content.decode()


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ({"when": {1, 2}, "deep": [1]}, "&quot;deep&quot;: [\n    1\n  ]"),
        ({(1, 2): "x"}, "{(1, 2): &#x27;x&#x27;}"),
    ],
)
def test_what_json_has_not_is_shown_as_python_writes_it(client: Client, value: Any, shown: str) -> None:
    kind, blob = JsonPlusSerializer(allowed_msgpack_modules=None).dumps_typed(value)
    LangGraphValue._base_manager.update(type=kind, blob=blob)
    row = LangGraphValue._base_manager.latest("pk")
    page = client.get(reverse("admin:helix_store_langgraph_langgraphvalue_change", args=[row.pk]))
    assert shown in page.content.decode()
