"""The stream view of a project that names no permission."""

from __future__ import annotations

import http.client

import pytest
from django.test import AsyncClient, Client, override_settings

from tests.asgi_server import AsgiServer, serving
from tests.databases import CommittedDatabase


@pytest.mark.parametrize("permission", [None, ""])
async def test_the_refusal_names_the_missing_setting(permission: str | None) -> None:
    with override_settings(HELIX_STORE={"STREAM_PERMISSION": permission}):
        response = await AsyncClient().get("/streams/of-nobody/")
    assert response.status_code == 403
    assert response.headers["Content-Type"] == "text/plain; charset=utf-8"
    assert 'HELIX_STORE["STREAM_PERMISSION"]' in response.content.decode()
    assert "of-nobody" not in response.content.decode()


def test_the_refusal_of_a_permission_does_not_name_the_setting() -> None:
    with override_settings(HELIX_STORE={"STREAM_PERMISSION": "tests.streams.test_stream_view.deny"}):
        assert Client().get("/streams/of-nobody/").content == b"Forbidden\n"


def test_the_refusal_under_wsgi_names_the_kind_of_server() -> None:
    with override_settings(HELIX_STORE={"STREAM_PERMISSION": "tests.streams.test_stream_view.allow"}):
        response = Client().get("/streams/of-nobody/")
    assert response.status_code == 501
    assert "ASGI server" in response.content.decode()


@pytest.mark.thorough
def test_a_server_process_logs_the_missing_setting_once(committed_db: CommittedDatabase) -> None:
    with serving(committed_db, settings="tests.streams.server_settings", HELIX_TEST_PERMISSION="") as server:
        assert [_status(server) for _ in range(3)] == [403] * 3
    assert len([line for line in server.log if "STREAM_PERMISSION" in line]) == 1


def _status(server: AsgiServer) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    try:
        connection.request("GET", "/streams/of-nobody/")
        return connection.getresponse().status
    finally:
        connection.close()
