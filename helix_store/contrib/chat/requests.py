"""What clients send: checked input, and the errors that refuse it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final, NoReturn

from django.core.exceptions import RequestDataTooBig
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.http.request import RawPostDataException

from helix_store import (
    ConflictError,
    FencedOutError,
    HelixStoreError,
    InvalidCursor,
    InvalidPayload,
    InvalidQuery,
    LimitExceeded,
    LockLostError,
    NotFoundError,
    NotPermitted,
    OutcomeUnknown,
    SessionEnded,
    StaleStateError,
    StoreBusy,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
    StreamClosed,
    StreamTruncated,
    TenantMoved,
)
from helix_store.contrib.chat import agui, aisdk
from helix_store.contrib.chat.stored import finite
from helix_store.core.limits import MAX_ID_BYTES, MAX_ID_CHARACTERS
from helix_store.core.payloads import size_of

__all__ = [
    "AgUiInput",
    "AiInput",
    "Answered",
    "NewMessage",
    "Refusal",
    "agui_input",
    "ai_input",
    "body_of",
    "checked_id",
    "error_response",
    "refuse",
    "text_field",
]

HEADERS: Final = {"Cache-Control": "private, no-store"}

_logger = logging.getLogger(__name__)


class Refusal(Exception):
    """A request is refused before its response begins."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        path: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.path = status, code, message, path
        self.headers = {} if headers is None else dict(headers)


def refuse(path: str, reason: str) -> NoReturn:
    """Raise the refusal of bad input, with its path in the body."""
    raise Refusal(
        HTTPStatus.BAD_REQUEST, "invalid_input", f"Invalid value at {path or '/'}: {reason}.", path=path
    )


def error_response(error: Refusal | HelixStoreError) -> HttpResponse:
    """Return the JSON of an error that happens before the response begins."""
    if isinstance(error, HelixStoreError):
        error = _refusal_of(error)
    body = {"code": error.code, "message": error.message, "path": error.path}
    return JsonResponse(body, status=error.status, headers={**HEADERS, **error.headers})


def _refusal_of(error: HelixStoreError) -> Refusal:
    path = getattr(error, "path", "")
    if isinstance(error, InvalidQuery) and path == "/using":
        # The alias comes from the project. No client can correct it, or needs to know the others.
        _logger.error("A chat has no database. %s", error)
        error, path = StoreUnavailable(), ""
    if isinstance(error, LimitExceeded):
        status = (
            HTTPStatus.TOO_MANY_REQUESTS
            if error.name == "max_waiting_posts"
            else HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        )
        return Refusal(
            status, error.code, str(error), headers={"Retry-After": "5"} if status == 429 else None
        )
    for kinds, status in _STATUSES:
        if isinstance(error, kinds):
            headers = {"Retry-After": "1"} if status == HTTPStatus.SERVICE_UNAVAILABLE else None
            return Refusal(status, error.code, str(error), path=path, headers=headers)
    return Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, error.code, str(error), path=path)


_STATUSES: Final[Sequence[tuple[Any, HTTPStatus]]] = (
    ((InvalidPayload, InvalidQuery, InvalidCursor), HTTPStatus.BAD_REQUEST),
    (NotPermitted, HTTPStatus.FORBIDDEN),
    (NotFoundError, HTTPStatus.NOT_FOUND),
    (SessionEnded, HTTPStatus.GONE),
    ((ConflictError, StreamClosed, StreamTruncated), HTTPStatus.CONFLICT),
    # If the request is repeated, it finds what is stored by then, or another database.
    ((StoreBusy, StoreTimeout, StoreUnavailable, StoreFull, TenantMoved), HTTPStatus.SERVICE_UNAVAILABLE),
    ((OutcomeUnknown, StaleStateError, LockLostError, FencedOutError), HTTPStatus.SERVICE_UNAVAILABLE),
)


def body_of(request: HttpRequest) -> dict[str, Any]:
    """Return the JSON object of a request."""
    try:
        text = request.body
    except RequestDataTooBig as exc:
        message = "The request is larger than DATA_UPLOAD_MAX_MEMORY_SIZE allows."
        raise Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "too_large", message) from exc
    except RawPostDataException as exc:
        # Middleware, such as Django's for CSRF, has read the body as a form with files.
        raise _is_no_json() from exc
    try:
        body = json.loads(text, parse_float=finite, parse_constant=finite)
    except (ValueError, RecursionError) as exc:
        raise _is_no_json() from exc
    if not isinstance(body, dict):
        refuse("", "expected an object")
    return body


def _is_no_json() -> Refusal:
    return Refusal(HTTPStatus.BAD_REQUEST, "invalid_input", "The body is not JSON.")


def checked_id(value: Any, path: str) -> str:
    """Return an id that an address can hold."""
    if not isinstance(value, str):
        refuse(path, "expected text")
    if not value or len(value) > MAX_ID_CHARACTERS:
        refuse(path, f"expected 1 to {MAX_ID_CHARACTERS} characters")
    if "/" in value or not value.isprintable():
        refuse(path, "an id must not contain a slash or a control character")
    if size_of(value) > MAX_ID_BYTES:
        refuse(path, f"expected at most {MAX_ID_BYTES} bytes of UTF-8")
    if value in (".", ".."):
        refuse(path, "clients resolve this id as a part of a path")
    return value


def text_field(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str):
        refuse(f"/{name}", "expected text")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The answer to a call: a decision, or what a client's tool has returned.

    ``path`` and ``id_path`` are the places of the answer and of the call's id in the request.
    """

    call_id: str
    path: str
    id_path: str
    approved: bool | None = None
    digest: str | None = None
    needs_digest: bool = True
    reason: str | None = None
    input: Any = ...
    result: Any = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewMessage:
    """A user's message, in the chat-completions form."""

    id: str
    content: Any
    metadata: Any = None
    path: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgUiInput:
    """What is read from a `RunAgentInput`. The rest of the client's history is not believed.

    ``held`` are the ids and roles of the messages that the client has.
    """

    thread_id: str
    run_id: str
    message: NewMessage | None
    answers: list[Answered] = field(default_factory=list)
    held: list[tuple[str, str]] = field(default_factory=list)
    client: dict[str, Any] = field(default_factory=dict)


def agui_input(body: Mapping[str, Any]) -> AgUiInput:
    thread_id = checked_id(body.get("threadId"), "/threadId")
    run_id = checked_id(body.get("runId"), "/runId")
    messages = body.get("messages")
    if not isinstance(messages, list):
        refuse("/messages", "expected a list")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            refuse(f"/messages/{index}", "expected an object with a role")
    answers = [*_resumed(body.get("resume")), *_results_of_tools(messages)]
    return AgUiInput(
        thread_id=thread_id,
        run_id=run_id,
        message=_new_message(messages),
        answers=answers,
        held=[
            (message["id"], message["role"])
            for message in messages
            if isinstance(message.get("id"), str) and message["role"] != "activity"
        ],
        client=_client(body),
    )


def _client(body: Mapping[str, Any]) -> dict[str, Any]:
    client: dict[str, Any] = {}
    for name, key in (("tools", "tools"), ("context", "context")):
        value = body.get(name)
        if value is not None and not isinstance(value, list):
            refuse(f"/{name}", "expected a list")
        if value:
            client[key] = value
    for name, key in (("forwardedProps", "forwarded_props"), ("state", "state")):
        if body.get(name) not in (None, {}, [], ""):
            client[key] = body[name]
    return client


def _new_message(messages: Sequence[Mapping[str, Any]]) -> NewMessage | None:
    """Return the user's message at the end, after everything that the agent has said."""
    for index in range(len(messages) - 1, -1, -1):
        message = messages[index]
        if message["role"] in ("assistant", "reasoning"):
            return None
        if message["role"] == "user":
            path = f"/messages/{index}"
            try:
                content = agui.posted(message.get("content"))
            except ValueError as exc:
                refuse(f"{path}/content", str(exc))
            return NewMessage(id=checked_id(message.get("id"), f"{path}/id"), content=content, path=path)
    return None


def _resumed(resume: Any) -> list[Answered]:
    if resume is None:
        return []
    if not isinstance(resume, list):
        refuse("/resume", "expected a list")
    answers = []
    for index, entry in enumerate(resume):
        path = f"/resume/{index}"
        if not isinstance(entry, dict):
            refuse(path, "expected an object")
        id_path = f"{path}/interruptId"
        call_id = checked_id(entry.get("interruptId"), id_path)
        payload, metadata = entry.get("payload"), entry.get("metadata")
        payload = payload if isinstance(payload, dict) else {"approved": payload}
        digest = payload.get("digest") or (metadata.get("digest") if isinstance(metadata, dict) else None)
        if digest is not None and not isinstance(digest, str):
            refuse(f"{path}/payload/digest", "expected text")
        reason = payload.get("reason")
        reason = reason if isinstance(reason, str) else None
        if entry.get("status") == "cancelled":
            answers.append(
                Answered(
                    call_id=call_id,
                    path=f"{path}/payload",
                    id_path=id_path,
                    approved=False,
                    digest=digest,
                    needs_digest=False,
                    reason=reason or "cancelled",
                )
            )
            continue
        if entry.get("status") != "resolved":
            refuse(f"{path}/status", "expected resolved or cancelled")
        if not isinstance(payload.get("approved"), bool):
            refuse(f"{path}/payload/approved", "expected true or false")
        answers.append(
            Answered(
                call_id=call_id,
                path=f"{path}/payload",
                id_path=id_path,
                approved=payload["approved"],
                digest=digest,
                reason=reason,
                input=payload.get("input", ...),
            )
        )
    return answers


def _results_of_tools(messages: Sequence[Mapping[str, Any]]) -> list[Answered]:
    """Return the results in a client's history, most of which may be of calls that were answered long ago.

    Clients insert a result after the message that makes its call, which need not be the last message. If a
    later message makes a call with the same id, the result is not of that call.
    """
    answers: list[Answered] = []
    made_later: set[str] = set()
    is_at_end = True
    for index in range(len(messages) - 1, -1, -1):
        message = messages[index]
        if message["role"] in ("assistant", "reasoning"):
            is_at_end = False
            made_later |= _calls_in(message)
        if message["role"] == "tool":
            path, call_id = f"/messages/{index}", message.get("toolCallId")
            if is_at_end:
                checked_id(call_id, f"{path}/toolCallId")
            if not isinstance(call_id, str) or call_id in made_later:
                continue
            error = message.get("error")
            answers.append(
                Answered(
                    call_id=call_id,
                    path=path,
                    id_path=f"{path}/toolCallId",
                    result=message.get("content"),
                    error=error if isinstance(error, str) and error else None,
                )
            )
    return answers[::-1]


def _calls_in(message: Mapping[str, Any]) -> set[str]:
    calls = message.get("toolCalls")
    ids = [call.get("id") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    return {call_id for call_id in ids if isinstance(call_id, str)}


@dataclass(frozen=True, slots=True, kw_only=True)
class AiInput:
    """What is read from a request of the AI SDK.

    ``before`` is the message before which the thread is rewound: that of an edit, or the answer to make anew.
    ``held`` is the answer that the client continues.
    """

    thread_id: str
    message: NewMessage | None
    answers: list[Answered] = field(default_factory=list)
    held: aisdk.Held | None = None
    is_regenerated: bool = False
    before: str | None = None
    client: dict[str, Any] = field(default_factory=dict)


_OF_AI: Final = frozenset({"id", "messages", "message", "trigger", "messageId"})


def ai_input(body: Mapping[str, Any]) -> AiInput:
    thread_id = checked_id(body.get("id"), "/id")
    messages: Any = []
    if "message" in body and body["message"] is not None:
        last, path = body["message"], "/message"
    else:
        messages = body.get("messages")
        if not isinstance(messages, list):
            refuse("/messages", "expected a list")
        if not messages and body.get("trigger") != "regenerate-message":
            refuse("/messages", "expected a message")
        last = messages[-1] if messages else None
        path = f"/messages/{len(messages) - 1}"
    rest = {name: value for name, value in body.items() if name not in _OF_AI}
    client = {"forwarded_props": rest} if rest else {}
    trigger = body.get("trigger", "submit-message")
    message_id = body.get("messageId")
    if message_id is not None:
        checked_id(message_id, "/messageId")
    if trigger == "regenerate-message":
        message = _user_message(last, path) if isinstance(last, dict) and last.get("role") == "user" else None
        return AiInput(
            thread_id=thread_id, message=message, is_regenerated=True, before=message_id, client=client
        )
    if trigger != "submit-message":
        refuse("/trigger", "expected submit-message or regenerate-message")
    if (at := _place_of_answer(messages, message_id)) is not None:
        last, path = messages[at], f"/messages/{at}"
    if not isinstance(last, dict) or not isinstance(last.get("parts"), list):
        refuse(path, "expected a message with parts")
    if last.get("role") == "assistant":
        return AiInput(
            thread_id=thread_id,
            message=None,
            answers=list(_answers(last["parts"], path)),
            held=aisdk.held_answer(last),
            client=client,
        )
    if last.get("role") != "user":
        refuse(f"{path}/role", "expected user or assistant")
    message = _user_message(last, path)
    return AiInput(thread_id=thread_id, message=message, before=message_id, client=client)


def _place_of_answer(messages: Sequence[Any], message_id: str | None) -> int | None:
    """Return the index of the answer that a request continues, which need not be the last message."""
    for index, message in enumerate(messages):
        is_answer = isinstance(message, dict) and message.get("role") == "assistant"
        if is_answer and message_id is not None and message.get("id") == message_id:
            return index
    return None


def _user_message(message: Mapping[str, Any], path: str) -> NewMessage:
    try:
        content = aisdk.posted(message.get("parts"))
    except ValueError as exc:
        refuse(f"{path}/parts", str(exc))
    return NewMessage(
        id=checked_id(message.get("id"), f"{path}/id"),
        content=content,
        metadata=message.get("metadata"),
        path=path,
    )


def _answers(parts: Sequence[Any], path: str) -> Any:
    for index, part in enumerate(parts):
        if not isinstance(part, dict) or not isinstance(part.get("toolCallId"), str):
            continue
        own = f"{path}/parts/{index}"
        id_path = f"{own}/toolCallId"
        call_id = checked_id(part["toolCallId"], id_path)
        approval = part.get("approval")
        state = part.get("state")
        if state == "approval-responded" and isinstance(approval, dict):
            if not isinstance(approval.get("approved"), bool):
                refuse(f"{own}/approval/approved", "expected true or false")
            descriptor = approval.get("descriptor")
            digest = descriptor.get("digest") if isinstance(descriptor, dict) else None
            reason = approval.get("reason")
            yield Answered(
                call_id=call_id,
                path=f"{own}/approval",
                id_path=id_path,
                approved=approval["approved"],
                digest=digest if isinstance(digest, str) else None,
                reason=reason if isinstance(reason, str) and reason else None,
            )
        elif state == "output-available" and not isinstance(approval, dict):
            yield Answered(call_id=call_id, path=own, id_path=id_path, result=part.get("output"))
        elif state == "output-error" and not isinstance(approval, dict):
            error = str(part.get("errorText", "error"))
            yield Answered(call_id=call_id, path=own, id_path=id_path, error=error)
