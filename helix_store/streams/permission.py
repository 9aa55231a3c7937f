"""The permission to read a stream, which the callable in ``HELIX_STORE["STREAM_PERMISSION"]`` decides."""

from __future__ import annotations

import logging
from functools import cache
from typing import Final

from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest
from django.utils.module_loading import import_string

from helix_store import conf
from helix_store.streams.sse import run_in_request

__all__ = ["NO_PERMISSION", "configured_permission", "permitted_tenant"]

NO_PERMISSION: Final = (
    'HELIX_STORE["STREAM_PERMISSION"] is not set. Without a permission no stream can be read.'
)

_logger = logging.getLogger(__name__)
_warn_once: Final = cache(_logger.warning)


def configured_permission() -> str | None:
    """Return the dotted path of the callable; if there is none, log a warning once per process."""
    permission = conf.stream_permission()
    if permission is None:
        _warn_once(NO_PERMISSION)
    return permission


async def permitted_tenant(request: HttpRequest, stream_id: str, *, permission: str) -> str | None:
    """Return the tenant whose stream the request may read, or ``None`` if access is denied.

    ``True`` allows the tenant ``""``, a text that is not empty allows the tenant of that name. Every other
    answer denies access. An empty text denies it because a user without a tenant must not get the tenant
    ``""``.
    """
    function = import_string(permission)
    if iscoroutinefunction(function):
        answer = await function(request, stream_id)
    else:
        answer = await run_in_request(function, request, stream_id)
    if answer is True:
        return ""
    if isinstance(answer, str):
        return answer or None
    if answer:
        _warn_once(
            "The stream permission %s returned a value of type %s, which denies access. It must return True, "
            "False or a tenant (text).",
            permission,
            type(answer).__name__,
        )
    return None
