"""The addresses of a chat: their requests, and the responses in the two protocols and in JSON."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property, partial
from http import HTTPStatus
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, Final, TypeVar
from uuid import UUID

from asgiref.sync import SyncToAsync, sync_to_async
from django.core.handlers.asgi import ASGIRequest
from django.db import InterfaceError, OperationalError, connections
from django.db.models import Q
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse, StreamingHttpResponse
from django.urls import URLPattern, path

from helix_store import (
    HelixStoreError,
    InvalidCursor,
    SessionNotFound,
    SessionState,
    Store,
    conf,
    new_id,
)
from helix_store.contrib.chat import agui, aisdk
from helix_store.contrib.chat.driver import Driver
from helix_store.contrib.chat.reading import (
    AgUi,
    AiSdk,
    Joined,
    Spoken,
    calls_of,
    follow,
    join,
    new_thread,
    next_of,
    waiting_of,
)
from helix_store.contrib.chat.requests import (
    HEADERS,
    AiInput,
    Answered,
    NewMessage,
    Refusal,
    agui_input,
    ai_input,
    body_of,
    checked_id,
    error_response,
    refuse,
    text_field,
)
from helix_store.contrib.chat.stored import entries
from helix_store.contrib.chat.threads import (
    THREAD,
    Activity,
    Thread,
    activity_of,
    give_answers,
    is_known,
    load_thread,
    open_calls,
    post_message,
    rewind_and_post,
    stop_thread,
    withdraw,
)
from helix_store.core.approvals import USER
from helix_store.engine.async_twins import is_async
from helix_store.engine.database import Database
from helix_store.engine.errors import translate
from helix_store.engine.expressions import read_cursor, write_cursor
from helix_store.models import Session
from helix_store.streams.views import outside_of_transactions

if TYPE_CHECKING:
    from helix_store.contrib.chat.driver import Driver

__all__ = ["Chat", "Views"]


R = TypeVar("R")

View = Callable[..., Awaitable[HttpResponseBase]]

_STREAM_HEADERS: Final = {
    **HEADERS,
    "Content-Type": "text/event-stream; charset=utf-8",
    # Without this header, nginx buffers the events.
    "X-Accel-Buffering": "no",
}
_LARGEST_PAGE: Final = 100

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Who:
    """The owner of the threads that a request may see, and who answers and posts."""

    store: Store
    owner: str
    actor: Any


class Views:
    """The views of one chat."""

    def __init__(self, chat: Driver) -> None:
        self._chat = chat

    def view(self, **methods: View) -> Callable[..., Any]:
        """Return the view of one address, from a function for each method."""

        async def view(request: HttpRequest, **arguments: str) -> HttpResponseBase:
            method = methods.get(request.method or "")
            if method is None:
                allowed = ", ".join(sorted(methods))
                refusal = Refusal(
                    HTTPStatus.METHOD_NOT_ALLOWED,
                    "method_not_allowed",
                    f"Allowed: {allowed}.",
                    headers={"Allow": allowed},
                )
                return error_response(refusal)
            try:
                for name, value in arguments.items():
                    checked_id(value, f"/{name}")
                return await method(request, **arguments)
            except (Refusal, HelixStoreError) as exc:
                return error_response(exc)
            except (OperationalError, InterfaceError) as exc:
                # The store translates its errors. This one is of a statement of the project: the signed-in
                # user, or a function of the request. Its database may be any.
                error = translate(exc, vendor="")
                if not isinstance(error, HelixStoreError):
                    raise
                _logger.warning("A request to a chat failed (%s).", error.code, exc_info=True)
                return error_response(error)

        if self._chat._owner is None:
            # These views know who has signed in: they answer 401, and Django's middleware does not redirect.
            view.login_required = False  # type: ignore[attr-defined]
        return outside_of_transactions(view)

    # Who asks

    async def _who(self, request: HttpRequest, *, runs: bool = False) -> _Who:
        user = await _user_of(request)
        owner = self._chat._owner
        if owner is None:
            owner = None if user is None else str(user.pk)
        elif callable(owner):
            owner = await _asked(owner, request)
        if owner is None or owner is False or owner == "":
            raise Refusal(HTTPStatus.UNAUTHORIZED, "unauthorized", "Sign in to use this chat.")
        tenant = self._chat._tenant
        if callable(tenant):
            tenant = await _asked(tenant, request)
        if not isinstance(tenant, str):
            raise Refusal(HTTPStatus.FORBIDDEN, "forbidden", "You may not use this chat.")
        if owner is True or not isinstance(owner, str | int | UUID):
            raise TypeError(f"The owner of a chat is text, a number or a UUID, not {type(owner).__name__}.")
        if runs:
            await self._require_permission(request)
        owner = str(owner)
        actor = _actor(owner) if user is None else user
        return _Who(store=self._chat.store(tenant), owner=owner, actor=actor)

    async def _require_permission(self, request: HttpRequest) -> None:
        may_run = self._chat._may_run
        if may_run is None:
            return
        answer = await _asked(may_run, request)
        if answer is True:
            return
        if isinstance(answer, int | float) and answer is not False and math.isfinite(answer):
            seconds = max(1, math.ceil(answer))
            message = f"Too many requests; try again in {seconds} seconds."
            headers = {"Retry-After": str(seconds)}
            raise Refusal(HTTPStatus.TOO_MANY_REQUESTS, "too_many_requests", message, headers=headers)
        raise Refusal(HTTPStatus.FORBIDDEN, "forbidden", "You may not run this agent.")

    # AG-UI

    async def agui(self, request: HttpRequest) -> HttpResponseBase:
        _require_asgi(request)
        who = await self._who(request, runs=True)
        given = agui_input(body_of(request))
        session_id = self._chat.session_id(who.owner, given.thread_id)

        def write() -> Joined:
            return self._written(who, session_id, given.thread_id, given.message, given.answers, given.client)

        joined = await _in_thread(write)
        spoken = AgUi(given.thread_id, given.run_id, held=given.held, shares_state=self._chat.share_state)
        return self._stream(who, session_id, spoken, joined, is_called=True)

    async def agui_thread(self, request: HttpRequest, thread: str) -> HttpResponseBase:
        _require_asgi(request)
        who = await self._who(request)
        session_id = self._chat.session_id(who.owner, thread)
        seen = _position(request.headers.get("Last-Event-ID"), "/Last-Event-ID")
        joined = await _in_thread(lambda: join(who.store, session_id))
        run = joined.thread.run
        run_id = request.GET.get("runId") or (new_id() if run is None else run.run_id)
        spoken = AgUi(thread, run_id, held=None, shares_state=self._chat.share_state)
        return self._stream(who, session_id, spoken, joined, seen=seen)

    # The AI SDK

    async def ai(self, request: HttpRequest) -> HttpResponseBase:
        _require_asgi(request)
        who = await self._who(request, runs=True)
        given = ai_input(body_of(request))
        session_id = self._chat.session_id(who.owner, given.thread_id)
        is_edit = given.message is not None and given.before is not None
        if given.is_regenerated or is_edit:
            user_message_id, joined = await _in_thread(
                lambda: self._made_anew(who, session_id, given, is_edit=is_edit and not given.is_regenerated)
            )
            spoken = AiSdk(after=user_message_id)
        else:
            joined = await _in_thread(
                lambda: self._written(
                    who, session_id, given.thread_id, given.message, given.answers, given.client
                )
            )
            after = None if given.message is None else given.message.id
            spoken = AiSdk(after=after, held=given.held)
        return self._stream(who, session_id, spoken, joined, is_called=True)

    def _made_anew(self, who: _Who, session_id: str, given: AiInput, *, is_edit: bool) -> tuple[str, Joined]:
        """Rewind the thread and post a user's message anew. Return the id of the message, and the thread."""
        message = given.message
        is_own = message is not None and (not is_edit or message.id == given.before)
        if message is not None and is_own and not is_known(who.store, session_id, message.id):
            # A client edits a message, or makes its answer anew, also if the request with it was lost.
            return message.id, self._written(who, session_id, given.thread_id, message, [], given.client)
        user_message_id = rewind_and_post(
            who.store,
            session_id,
            before=given.before,
            edited=message if is_edit else None,
            actor=who.actor,
            client=given.client,
        )
        joined = join(who.store, session_id)
        if joined.thread.activity is Activity.DUE:
            # The driver that was called for the message may have found the thread locked.
            self._chat.call_driver(session_id, who.store.alias, who.store.tenant)
        return user_message_id, joined

    async def ai_stream(self, request: HttpRequest, thread: str) -> HttpResponseBase:
        _require_asgi(request)
        who = await self._who(request)
        session_id = self._chat.session_id(who.owner, thread)
        seen = _position(request.GET.get("from"), "/from")
        joined = await _in_thread(lambda: join(who.store, session_id))
        if joined.thread.activity is Activity.IDLE:
            return HttpResponse(status=HTTPStatus.NO_CONTENT, headers=HEADERS)
        is_at_work = joined.thread.activity is Activity.RUNNING and joined.is_under_way
        after = None if is_at_work else next_of(joined.thread)
        return self._stream(who, session_id, AiSdk(after=after), joined, seen=seen)

    def _written(
        self,
        who: _Who,
        session_id: str,
        thread_id: str,
        message: NewMessage | None,
        answers: list[Answered],
        client: Mapping[str, Any],
    ) -> Joined:
        """Store what a request says, and return the thread to follow."""
        if message is None and not answers:
            return join(who.store, session_id)
        # Before anything is stored, so that the response has all that follows. What is stored decides the
        # activity.
        joined = None
        try:
            joined = join(who.store, session_id, activity=Activity.IDLE)
        except SessionNotFound:
            if message is None or any(answer.approved is not None for answer in answers):
                raise
        new: dict[str, bool] = {}
        if joined is not None and answers:
            # A client sends its history with a message: most results are of calls that are not open.
            new = give_answers(
                who.store,
                joined.thread.state,
                answers,
                calls=joined.thread.open_calls,
                actor=who.actor,
                client=client,
                messages=joined.thread.messages,
            )
            if new and message is None:
                # A driver may have been and gone. What it has said is in the stream.
                given = {id for id, is_answered in new.items() if is_answered}
                is_open = joined.thread.open_calls.keys() - given
                return _with(joined, activity=Activity.IDLE if is_open else Activity.DUE)
        if message is None:
            return join(who.store, session_id)
        post, begun = post_message(
            self._chat,
            who.store,
            session_id,
            thread_id,
            message,
            owner=who.owner,
            actor=who.actor,
            client=client,
        )
        if begun is not None and post is not None:
            return new_thread(begun, post)
        if post is None or post.state != "waiting" or new:
            return join(who.store, session_id)
        if joined is None:
            # Another request has begun the thread: all that was said in it is in the rest of the stream.
            return join(who.store, session_id, activity=Activity.DUE, newest=(0, {}))
        # A turn may have received it since, and ended. All that it has said is in the rest of the stream.
        others = [each for each in joined.thread.posts if each.post_id != post.post_id]
        return _with(joined, posts=[*others, post], activity=Activity.DUE)

    def _stream(
        self,
        who: _Who,
        session_id: str,
        spoken: Spoken,
        joined: Joined,
        *,
        seen: int | None = None,
        is_called: bool = False,
    ) -> StreamingHttpResponse:
        body = follow(
            self._chat,
            who.store,
            session_id,
            spoken,
            joined,
            seen=seen,
            is_called=is_called,
            heartbeat=conf.stream_options().heartbeat,
        )
        headers = dict(_STREAM_HEADERS)
        if isinstance(spoken, AiSdk):
            headers["x-vercel-ai-ui-message-stream"] = "v1"
        return StreamingHttpResponse(_without_request_thread(body), headers=headers)

    # JSON

    async def threads(self, request: HttpRequest) -> HttpResponse:
        who = await self._who(request)
        limit = _limit(request.GET.get("limit"))
        search, cursor = request.GET.get("q", ""), request.GET.get("cursor") or None
        if "\0" in search:
            refuse("/q", "text cannot hold NUL")
        return _json(await _in_thread(lambda: self._listed(who, search, cursor, limit)))

    def _listed(self, who: _Who, search: str, cursor: str | None, limit: int) -> dict[str, Any]:
        # A branch has the owner and the metadata of its source, but no id of a thread.
        found = Session.objects.using(who.store.alias).filter(
            tenant=who.store.tenant,
            agent_type=self._chat.agent_type,
            user_id=who.owner,
            session_id__startswith=f"{self._chat._prefix}-",
        )
        if search:
            found = found.filter(title__icontains=search)
        query = ["threads", who.store.tenant, self._chat.agent_type, who.owner, search]
        if cursor is not None:
            try:
                moment, key = read_cursor(cursor, query=query)
            except InvalidCursor as exc:
                raise Refusal(HTTPStatus.BAD_REQUEST, exc.code, str(exc), path="/cursor") from exc
            at = datetime.fromisoformat(moment)
            found = found.filter(Q(updated_at__lt=at) | Q(updated_at=at, pk__lt=key))
        columns = (
            "pk",
            "session_id",
            "title",
            "status",
            "metadata",
            "created_at",
            "updated_at",
            "message_count",
        )
        page = found.order_by("-updated_at", "-pk").values(*columns)[: limit + 1]
        rows: list[dict[str, Any]] = Database(who.store.alias, who.store.tenant).query(partial(list, page))
        threads = [
            head
            for row in rows[:limit]
            if (head := _head(row)) is not None
            and row["session_id"] == self._chat.session_id(who.owner, head["id"])
        ]
        more = None
        if len(rows) > limit:
            last = rows[limit - 1]
            more = write_cursor([last["updated_at"].isoformat(), last["pk"]], query=query)
        return {"threads": threads, "cursor": more}

    async def thread(self, request: HttpRequest, thread: str) -> HttpResponse:
        who = await self._who(request)
        kind = request.GET.get("format", "agui")
        if kind not in ("agui", "ai"):
            refuse("/format", "expected agui or ai")
        session_id = self._chat.session_id(who.owner, thread)

        def read() -> dict[str, Any]:
            loaded = load_thread(who.store, session_id)
            usage = who.store.usage.get_rollup(session_id)
            return {
                **_shown(thread, loaded, kind),
                "usage": None if usage is None else _usage(usage.to_dict()),
            }

        return _json(await _in_thread(read))

    async def rename(self, request: HttpRequest, thread: str) -> HttpResponse:
        who = await self._who(request)
        title = text_field(body_of(request), "title")
        session_id = self._chat.session_id(who.owner, thread)

        def write() -> None:
            if not who.store.sessions.session_exists(session_id):
                raise SessionNotFound(session_id)
            # Under the lock: a change would make the step of a worker stale.
            with who.store.locks.wait_acquire(session_id, timeout_ms=5_000) as lock:
                session = who.store.session(session_id, fencing_token=lock.fencing_token)
                session.update(lambda state: _set_title(state, title))
            # A message that has arrived in between has found the thread locked.
            if activity_of(who.store, session_id) is Activity.DUE:
                self._chat.call_driver(session_id, who.store.alias, who.store.tenant)

        await _in_thread(write)
        return _json({"id": thread, "title": title})

    async def delete(self, request: HttpRequest, thread: str) -> HttpResponse:
        who = await self._who(request)
        session_id = self._chat.session_id(who.owner, thread)
        if not await _in_thread(lambda: who.store.session(session_id).delete()):
            raise SessionNotFound(session_id)
        return HttpResponse(status=HTTPStatus.NO_CONTENT, headers=HEADERS)

    async def stop(self, request: HttpRequest, thread: str) -> HttpResponse:
        who = await self._who(request)
        session_id = self._chat.session_id(who.owner, thread)
        return _json({"stopped": await _in_thread(lambda: stop_thread(who.store, session_id))})

    async def post(self, request: HttpRequest, thread: str) -> HttpResponse:
        who = await self._who(request, runs=True)
        body = body_of(request)
        try:
            content = agui.posted(body.get("content"))
        except ValueError as exc:
            refuse("/content", str(exc))
        message = NewMessage(id=checked_id(body.get("id", new_id()), "/id"), content=content)
        session_id = self._chat.session_id(who.owner, thread)

        def write() -> str:
            post, _ = post_message(
                self._chat,
                who.store,
                session_id,
                thread,
                message,
                owner=who.owner,
                actor=who.actor,
                client={},
                begin=False,
            )
            return "received" if post is None else str(post.state)

        state = await _in_thread(write)
        return _json({"id": message.id, "state": state}, status=HTTPStatus.CREATED)

    async def withdraw(self, request: HttpRequest, thread: str, post: str) -> HttpResponse:
        who = await self._who(request)
        session_id = self._chat.session_id(who.owner, thread)
        if not await _in_thread(lambda: withdraw(who.store, session_id, post)):
            message = "No message with this id waits: the agent may have received it."
            raise Refusal(HTTPStatus.NOT_FOUND, "post_not_found", message)
        return HttpResponse(status=HTTPStatus.NO_CONTENT, headers=HEADERS)

    async def answer(self, request: HttpRequest, thread: str, call: str) -> HttpResponse:
        who = await self._who(request, runs=True)
        answer = _answered(body_of(request), call)
        session_id = self._chat.session_id(who.owner, thread)

        def write() -> bool:
            state = who.store.session(session_id).load()
            asked = state.pending_client_tool_calls.get(call)
            if asked is None and call not in state.completed_client_tool_calls:
                message = "The thread has no such call."
                raise Refusal(HTTPStatus.NOT_FOUND, "call_not_found", message)
            if asked is not None and (asked.get("approval_id") is None) != (answer.approved is None):
                reason = "an approval needs approved and digest; a client's tool, result or error"
                name = "result" if answer.error is None else "error"
                refuse(f"/{name if answer.approved is None else 'approved'}", reason)
            calls = open_calls(who.store, state)
            return bool(give_answers(who.store, state, [answer], calls=calls, actor=who.actor))

        return _json({"id": call, "accepted": await _in_thread(write)})


# --- Requests ----------------------------------------------------------------------------------------


def _require_asgi(request: HttpRequest) -> None:
    if not isinstance(request, ASGIRequest):
        message = "A chat needs an ASGI server, such as uvicorn. This server uses WSGI."
        raise Refusal(HTTPStatus.NOT_IMPLEMENTED, "needs_asgi", message)


async def _user_of(request: HttpRequest) -> Any:
    """Return the signed-in user, or ``None``.

    Middleware that knows the user from a token, or puts another one in the place of the signed-in user, sets
    ``request.user``. Django's ``request.auser`` would ask the session.
    """
    if not hasattr(request, "user"):
        auser = getattr(request, "auser", None)
        user = None if auser is None else await auser()
        return user if user is not None and user.is_authenticated else None
    return await _in_thread(lambda: request.user if request.user.is_authenticated else None)


def _actor(owner: str) -> str:
    """Return the name under which an owner who is not a Django user posts and answers.

    Text in the stored form of a Django user would impersonate that user.
    """
    return f"owner:{owner}" if owner.startswith(USER) else owner


async def _asked(function: Callable[[HttpRequest], Any], request: HttpRequest) -> Any:
    if is_async(function):
        return await function(request)
    answer = await sync_to_async(function, thread_sensitive=True)(request)
    return await answer if isawaitable(answer) else answer


async def _in_thread(call: Callable[[], R]) -> R:
    return await sync_to_async(call, thread_sensitive=True)()


def _with(joined: Joined, **changes: Any) -> Joined:
    """Return what was read before a request has changed the thread, with what it has changed."""
    return replace(joined, thread=replace(joined.thread, **changes))


def _position(text: str | None, path: str) -> int | None:
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        refuse(path, "expected a whole number")
    return int(text)


def _limit(text: str | None) -> int:
    if not text:
        return 30
    if not (text.isascii() and text.isdigit() and len(text) < 19 and 1 <= int(text) <= _LARGEST_PAGE):
        refuse("/limit", f"expected a whole number from 1 to {_LARGEST_PAGE}")
    return int(text)


def _answered(body: Mapping[str, Any], call_id: str) -> Answered:
    approved, digest = body.get("approved"), body.get("digest")
    if approved is not None:
        if not isinstance(approved, bool):
            refuse("/approved", "expected true or false")
        if not isinstance(digest, str):
            refuse("/digest", "an answer to an approval needs the digest that was shown")
        reason = body.get("reason")
        return Answered(
            call_id=call_id,
            path="",
            id_path="/call",
            approved=approved,
            digest=digest,
            reason=reason if isinstance(reason, str) and reason else None,
            input=body.get("input", ...),
        )
    if ("result" in body) == ("error" in body):
        path = "/error" if "error" in body else "/approved"
        refuse(path, "expected approved and digest, or one of result and error")
    error = body.get("error")
    if "error" in body and not isinstance(error, str):
        refuse("/error", "expected text")
    return Answered(call_id=call_id, path="", id_path="/call", result=body.get("result"), error=error)


# --- Responses ---------------------------------------------------------------------------------------


def _json(body: Any, status: int = HTTPStatus.OK) -> JsonResponse:
    return JsonResponse(body, status=status, headers=HEADERS)


def _shown(thread_id: str, thread: Thread, kind: str) -> dict[str, Any]:
    stored = entries(thread.messages)
    calls = thread.open_calls
    messages = agui.messages_of(stored) if kind == "agui" else aisdk.messages_of(stored, calls_of(thread))
    return {
        "id": thread_id,
        "title": thread.state.title,
        "status": _status(thread),
        "messages": messages,
        "calls": [_call(call_id, call) for call_id, call in calls.items()],
        "waiting": [
            {"id": entry.id, "role": entry.role, "content": entry.content} for entry in waiting_of(thread)
        ],
    }


def _status(thread: Thread) -> str:
    if thread.activity is not Activity.IDLE:
        return "running"
    if thread.open_calls:
        return "waiting"
    return "idle" if thread.state.status == "active" else str(thread.state.status)


def _call(call_id: str, call: Mapping[str, Any]) -> dict[str, Any]:
    is_approval = call.get("approval_id") is not None
    shown = {
        "id": call_id,
        "name": call.get("tool_name"),
        "input": call.get("input"),
        "digest": call.get("digest"),
        "kind": "approval" if is_approval else "client",
    }
    return {**shown, "editable": bool(call.get("editable"))} if is_approval else shown


def _usage(rollup: Mapping[str, Any]) -> dict[str, Any]:
    return {"tokens": rollup.get("tokens"), "cost_usd": rollup.get("cost_usd")}


def _head(row: Mapping[str, Any]) -> dict[str, Any] | None:
    thread_id = _metadata(row["metadata"]).get(THREAD)
    if thread_id is None:
        return None
    return {
        "id": thread_id,
        "title": row["title"],
        "status": row["status"],
        "created_at": row["created_at"].isoformat(),
        "updated_at": row["updated_at"].isoformat(),
        "message_count": row["message_count"],
    }


def _metadata(value: Any) -> Mapping[str, Any]:
    value = json.loads(value) if isinstance(value, str) else value
    return value if isinstance(value, Mapping) else {}


def _set_title(state: SessionState, title: str) -> None:
    state.title = title


async def _without_request_thread(body: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Release the thread and the connections of the request, then send the body.

    Django keeps a thread for a request until its response ends, and a response of a chat can last for hours.
    """
    async with aclosing(body):
        await sync_to_async(_close_connections, thread_sensitive=True)()
        context = SyncToAsync.thread_sensitive_context.get(None)
        if context is not None:
            executor = SyncToAsync.context_to_thread_executor.pop(context, None)
            if executor is not None:
                executor.shutdown(wait=False)
        async for part in body:
            yield part


def _close_connections() -> None:
    for connection in connections.all(initialized_only=True):
        # A test may run the view inside a transaction.
        if not connection.in_atomic_block:
            connection.close()


class Chat(Driver):
    """A durable chat, for ``path("chat/", chat.urls)``.

    ``answer(turn, out)`` takes one turn of the agent. It is synchronous or a coroutine function. ``tenant``
    and ``owner`` are values or (async) functions of the request; by default, the owner is the primary key of
    the signed-in user, and everybody else gets 401. ``may_run(request)`` returns true, false (403) or seconds
    (429). ``runner(session_id, using, tenant)`` has `drive` called, by default in a thread of this process.
    ``title`` is a function of the first message.

    Example::

        def answer(turn, out):
            while turn.is_active:
                with turn.step() as step:
                    out.text("Hello!")
                    step.say({"role": "assistant", "content": "Hello!"})
                    step.end_turn()

        urlpatterns = [path("chat/", Chat("support", answer).urls)]
    """

    @property
    def urls(self) -> tuple[list[URLPattern], str, str]:
        """The addresses of the chat, for ``path(…, chat.urls)``, in the namespace ``name``."""
        return self._patterns, "helix_store_chat", self.name

    @cached_property
    def _patterns(self) -> list[URLPattern]:
        views = Views(self)
        view = views.view
        thread = "threads/<str:thread>/"
        return [
            path("agui/", view(POST=views.agui), name="agui"),
            path("agui/<str:thread>/", view(GET=views.agui_thread), name="agui-thread"),
            path("ai/", view(POST=views.ai), name="ai"),
            path("ai/<str:thread>/stream", view(GET=views.ai_stream), name="ai-stream"),
            path("threads/", view(GET=views.threads), name="threads"),
            path(thread, view(GET=views.thread, PATCH=views.rename, DELETE=views.delete), name="thread"),
            path(f"{thread}stop/", view(POST=views.stop), name="stop"),
            path(f"{thread}posts/", view(POST=views.post), name="posts"),
            path(f"{thread}posts/<str:post>/", view(DELETE=views.withdraw), name="post"),
            path(f"{thread}calls/<str:call>/", view(POST=views.answer), name="call"),
        ]
