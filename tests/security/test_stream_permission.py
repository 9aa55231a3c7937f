"""Who may read a stream: which answers of the project's permission allow access."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from django.http import HttpRequest
from django.test import AsyncClient, override_settings

from helix_store.stores import DatabaseStreamManager
from tests.cells import for_each
from tests.databases import CommittedDatabase

DENYING: dict[str, Any] = {
    "empty_text": "",
    "none": None,
    "false": False,
    "zero": 0,
    "one": 1,
    "float": 1.0,
    "tuple": ("",),
    "bytes": b"tenant",
    "instance": object(),
}


def _permission(answer: Any) -> Callable[[HttpRequest, str], Any]:
    return lambda request, stream_id: answer


globals().update({f"answers_{name}": _permission(answer) for name, answer in DENYING.items()})


async def answers_empty_text_asynchronously(request: HttpRequest, stream_id: str) -> str:
    return ""


def answers_true(request: HttpRequest, stream_id: str) -> bool:
    return True


def answers_text(request: HttpRequest, stream_id: str) -> str:
    return "tenant-of-the-reader"


async def _status(database: CommittedDatabase, name: str) -> int:
    configured = {
        "STREAM_PERMISSION": f"{__name__}.answers_{name}",
        "STREAMS": {"using": database.alias},
    }
    with override_settings(HELIX_STORE=configured):
        response: Any = await AsyncClient().get("/streams/of-nobody/")
        if response.streaming:
            assert [part async for part in response]
        return int(response.status_code)


async def _written(database: CommittedDatabase, tenant: str) -> None:
    streams = DatabaseStreamManager(database.alias, tenant=tenant)
    await streams.create_writer("of-nobody", "run", "agent")
    await streams.end_stream("of-nobody")


@pytest.mark.thorough
@for_each("name", [*DENYING, "empty_text_asynchronously"])
async def test_only_true_and_a_tenant_allow(committed_db: CommittedDatabase, name: str) -> None:
    await _written(committed_db, "")
    assert await _status(committed_db, name) == 403


@pytest.mark.parametrize(("name", "tenant"), [("true", ""), ("text", "tenant-of-the-reader")])
async def test_true_is_the_empty_tenant_and_a_text_is_the_tenant_of_that_name(
    committed_db: CommittedDatabase, name: str, tenant: str
) -> None:
    await _written(committed_db, tenant)
    assert await _status(committed_db, name) == 200


@for_each(("name", "type_name"), [("one", "int"), ("bytes", "bytes"), ("instance", "object")])
async def test_an_answer_that_looks_like_a_yes_is_logged_once_by_the_name_of_the_callable(
    committed_db: CommittedDatabase, name: str, type_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    # A name that no other test asks for: the message is logged once per process.
    alias = f"{name}_once_on_{committed_db.vendor}"
    caplog.clear()  # The rows share it.
    globals()[f"answers_{alias}"] = _permission(DENYING[name])
    with caplog.at_level(logging.WARNING, "helix_store"):
        assert [await _status(committed_db, alias) for _ in range(3)] == [403] * 3
    (message,) = [record.getMessage() for record in caplog.records if record.name.startswith("helix_store")]
    assert f"{__name__}.answers_{alias}" in message
    assert type_name in message
    assert "tenant" in message


async def test_a_plain_no_is_not_logged(
    committed_db: CommittedDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("empty_text", "none", "false", "zero"):
        assert await _status(committed_db, name) == 403
    assert [record for record in caplog.records if record.name.startswith("helix_store")] == []
