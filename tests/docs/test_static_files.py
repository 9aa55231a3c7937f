"""The ASGI application that the page of the admin shows serves the admin's style sheets in development."""

from __future__ import annotations

from typing import Any

from asgiref.testing import ApplicationCommunicator
from django.test import override_settings

from tests.docs.projects import File, blocks_of
from tests.docs.test_examples import ROOT

# The module has no annotations.
_COMMUNICATOR: Any = ApplicationCommunicator
PATH = "/static/admin/css/base.css"


async def status_of(application: object) -> int:
    scope = {"type": "http", "method": "GET", "path": PATH, "raw_path": PATH.encode(), "headers": []}
    request: Any = _COMMUNICATOR(application, {**scope, "query_string": b"", "http_version": "1.1"})
    await request.send_input({"type": "http.request"})
    response = await request.receive_output()
    while (await request.receive_output()).get("more_body"):
        pass
    await request.wait()
    return int(response["status"])


async def test_the_admin_has_its_style_under_an_asgi_server_in_development() -> None:
    page = (ROOT / "docs" / "admin.md").read_text()
    (shown,) = (block for block in blocks_of(page) if isinstance(block, File) and "asgi" in block.path)
    namespace: dict[str, object] = {}
    with override_settings(DEBUG=True):
        exec(shown.text, namespace)  # noqa: S102  our own documentation
        assert await status_of(namespace["application"]) == 200
