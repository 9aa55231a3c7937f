"""Links to pages on which a person answers an approval without the admin."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, NamedTuple
from uuid import UUID

from django.contrib.auth import get_user_model
from django.core import signing
from django.core.exceptions import ValidationError
from django.db.models import Q
from django.urls import reverse

from helix_store import conf
from helix_store.core import moments, validation
from helix_store.core.approvals import USER
from helix_store.engine.async_twins import async_twin
from helix_store.engine.database import Database
from helix_store.exceptions import (
    ConflictError,
    InvalidPayload,
    NotFoundError,
    shown_id,
)
from helix_store.sessions.tool_calls import current_call
from helix_store.sessions.waiting import calls_of

__all__ = ["aanswer_url", "answer_url"]

_logger = logging.getLogger(__name__)

_SALT: Final = "helix_store.answering"


class Link(NamedTuple):
    """What a link to an answer page names. Its signature protects all of it."""

    using: str
    tenant: str
    session_id: str
    tool_call_id: str
    digest: str
    user_key: str
    """The primary key of the only user for whom the link works, as text."""
    expires_at: int
    """In epoch milliseconds."""
    version: int | None = None
    """The version of the session when the link was made: a later answer uses the link up."""
    requested_at: int | None = None
    """When the call was asked, in epoch milliseconds: a call that is asked again is another one."""

    @property
    def has_expired(self) -> bool:
        # A link without a version was made before links had one. It would work more than once.
        return self.version is None or self.expires_at <= validation.datetime_to_milliseconds(moments.now())

    def is_about(self, call: Mapping[str, Any]) -> bool:
        """Return whether an open call is the one that was asked when the link was made."""
        return (self.digest, self.requested_at) == (call["digest"], _requested_at(call))

    def has_answered(self, actors: Iterable[str | None]) -> bool:
        """Return whether the user of the link is one of these actors."""
        return f"{USER}{self.user_key}" in actors


def answer_url(
    session_id: str,
    tool_call_id: str,
    *,
    actor: Any,
    tenant: str = "",
    using: str | None = None,
    expires: timedelta = timedelta(days=7),
) -> str:
    """Return the path of a page on which this user can approve or reject a call, for a mail or a message.

    ``session_id`` is the session that owns the call, ``actor`` a Django user or the primary key of one, also
    as text. The path works for that user alone, once, until the call is answered, changes or is asked again,
    and at most for the duration ``expires``. One query, two if the state holds an answer that may be the
    agent's own, and one more for a key. Raises `SessionNotFound`, `NotFoundError` for an unknown call,
    `ConflictError` for an answered one, and `InvalidPayload` for any other actor and for a call that asks for
    a result. The page is served where the setting ``ANSWER_PAGES`` is true; without it here, a warning is
    logged.
    """
    if not conf.answer_pages():
        _logger.warning(
            'HELIX_STORE["ANSWER_PAGES"] is False here. The link is 404 unless the process that serves it '
            "has the setting."
        )
    user_key = _user_key(actor)
    validation.identifier(session_id, "session_id")
    validation.identifier(tool_call_id, "tool_call_id")
    if not isinstance(expires, timedelta) or expires <= timedelta(0) or not validation.is_age(expires):
        reason = "expected a duration of at most a hundred years, such as timedelta(days=7)"
        raise InvalidPayload(path="expires", reason=reason)
    db = Database(using, validation.tenant(tenant), None)
    version, call = _open_approval(db, session_id, tool_call_id)
    link = Link(
        db.alias,
        db.tenant,
        session_id,
        tool_call_id,
        call["digest"],
        user_key,
        validation.datetime_to_milliseconds(moments.now() + expires),
        version,
        _requested_at(call),
    )
    return reverse("helix_store:answer", args=[signing.dumps(list(link), salt=_SALT, compress=True)])


aanswer_url = async_twin(answer_url)


def _user_key(actor: Any) -> str:
    """Return the primary key of a user as text, from the user, the key, or its text."""
    key: Any = None
    if hasattr(actor, "get_username"):
        key = getattr(actor, "pk", None)
    elif isinstance(actor, str | int | UUID) and not isinstance(actor, bool):
        # What cannot be a key of this model of users is not the key of one.
        with suppress(ValueError, ValidationError):
            users = get_user_model()._default_manager.filter(Q(("pk", actor)))
            key = users.values_list("pk", flat=True).first()
    if key is None:
        raise InvalidPayload(path="actor", reason="expected a Django user that is stored, or the key of one")
    return str(key)


def _requested_at(call: Mapping[str, Any]) -> int | None:
    at = call.get("requested_at")
    return at if type(at) is int else None


def _open_approval(db: Database, session_id: str, tool_call_id: str) -> tuple[int, dict[str, Any]]:
    """Return the version of the session and the call."""
    version, calls, open_calls = calls_of(db, session_id)
    call = calls.pending.get(tool_call_id)
    if tool_call_id not in calls.completed and not isinstance(call, dict):
        raise NotFoundError(f"The session does not wait for a call {shown_id(tool_call_id)}.")
    if call is None or tool_call_id in calls.completed or tool_call_id not in open_calls:
        raise ConflictError(f"The call {shown_id(tool_call_id)} has been answered.")
    if call.get("approval_id") is None:
        raise InvalidPayload(path="tool_call_id", reason="the call asks for a result, not for an approval")
    return version, current_call(call)


def link_of(token: str) -> Link | None:
    """Return what a token names, or ``None`` if its signature is not valid."""
    try:
        return Link(*signing.loads(token, salt=_SALT))
    except (signing.BadSignature, TypeError, ValueError):
        return None
