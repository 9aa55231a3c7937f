"""Settings of the server that tests of the stream view start: the example project, open to everyone."""

from __future__ import annotations

import os
from typing import Any

from django.http import HttpRequest

from example_project import settings as example

globals().update({name: value for name, value in vars(example).items() if name.isupper()})

HELIX_STORE: dict[str, Any] = {
    "STREAM_PERMISSION": os.environ.get("HELIX_TEST_PERMISSION", f"{__name__}.everyone") or None,
    "STREAMS": {"heartbeat": 0.5},
}
# A pool would keep an unused connection open.
for database in example.DATABASES.values():
    database["OPTIONS"].pop("pool", None)


def everyone(request: HttpRequest, stream_id: str) -> str | bool:
    """Everyone may read the streams of the test's tenant, but for those that are called secret."""
    return False if stream_id == "secret" else os.environ["HELIX_TEST_TENANT"]
