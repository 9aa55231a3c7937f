"""A turn of a chat: a turn whose steps are stored with what was streamed."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, cast

from django.db import connections, transaction

from helix_store import (
    ConflictError,
    HelixStoreError,
    Message,
    SessionHandle,
    SessionState,
    Step,
    Store,
    Turn,
    call_digest,
)
from helix_store.contrib.chat.out import Out, Writer
from helix_store.contrib.chat.stored import entries_of, is_added, is_of_user, own_id, without_own_keys
from helix_store.contrib.chat.threads import client_of, newest_client
from helix_store.core.payloads import copy_json
from helix_store.engine.async_twins import BothContexts, async_twin

__all__ = ["ChatTurn", "Client", "digest_of", "patch"]

_LONGEST_PATCH: Final = 50_000

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """What the client sent with its message or its answer. All of it is untrusted text."""

    tools: list[Any] = field(default_factory=list)
    context: list[Any] = field(default_factory=list)
    forwarded_props: Any = None
    state: Any = None


class ChatTurn(Turn):
    """A `Turn` whose messages and steps are those of a chat. `helix_store.contrib.chat` makes it."""

    def __init__(
        self,
        session: SessionHandle,
        store: Store,
        *,
        agent_type: str,
        share_state: bool,
        flush_seconds: float,
    ) -> None:
        super().__init__(session)
        self._chat_store = store
        self._agent_type = agent_type
        self._shares_state = share_state
        self._flush_seconds = flush_seconds
        self._writer: Writer | None = None
        self._client: Client | None = None
        self._shared: Any = None
        self._answers: dict[str, dict[str, Any]] = {}
        self._tokens: list[dict[str, Any]] = []
        self.has_committed = False

    @property
    def writer(self) -> Writer:
        if self._writer is None:
            if self.run is None or self.fencing_token is None:
                raise ConflictError("The turn has no run; speak between its start and its end.")
            self._writer = Writer(
                self._chat_store,
                self.session.id,
                self._agent_type,
                token=self.fencing_token,
                run_id=self.run.run_id,
                seconds=self._flush_seconds,
            )
            self._writer.step_number = self.state.step_count + 1
            state = self.state
            self._shared = copy_json(state.custom_state)
            self._answers = {
                call_id: {**state.pending_client_tool_calls.get(call_id, {}), **answer}
                for call_id, answer in self.results.items()
            }
        return self._writer

    @property
    def client(self) -> Client:
        """What the client sent with the newest message of a user, or with an answer to a call after it."""
        return self.load_client() if self._client is None else self._client

    def load_client(self) -> Client:
        """Read what the client sent. The driver calls this for a coroutine function, which could not wait."""
        self._client = Client(**newest_client(self._chat_store, self.session.id))
        return self._client

    def _note_received(self, messages: Sequence[Message]) -> None:
        """Take what the client sent with messages that arrived during the turn."""
        users = [message for message in messages if is_of_user(message)]
        if users and self._client is not None:
            self._client = Client(**client_of(users[-1]))

    def receive(self) -> list[Message]:
        """Receive due posts now, as `Turn.receive` does."""
        received = super().receive()
        self._note_received(received)
        self.writer.received([own_id(message) or "" for message in received])
        return received

    areceive = async_twin(receive)  # type: ignore[arg-type]  # it is called on this class alone

    def messages(self, last: int | None = None) -> list[Message]:
        """Return all messages of the session, or the ``last`` ones, oldest first, as a model expects them."""
        stored = super().messages(last)
        said = [message for message in stored if not is_added(message)]
        if last is not None and len(said) < len(stored) == last:
            said = [message for message in super().messages() if not is_added(message)][-last:]
        return [without_own_keys(message) for message in said]

    amessages = async_twin(messages)  # type: ignore[arg-type]  # it is called on this class alone

    def step(self, *args: Any, **options: Any) -> Step:
        """Return the next step, as `Turn.step` does. It is stored with what `Out` has said in it."""
        return cast(Step, _ChatStep(self, super().step(*args, **options)))

    def tokens(self, *, model: str, prompt: int = 0, completion: int = 0, **options: Any) -> None:
        """Record the tokens of a model's answer, as `Turn.tokens` does; clients see them too."""
        super().tokens(model=model, prompt=prompt, completion=completion, **options)
        counts = {"prompt": prompt, "completion": completion}
        counts |= {name: value for name, value in options.items() if name in _COUNTS and value}
        self._tokens.append({"model": model, **counts})

    atokens = async_twin(tokens)  # type: ignore[arg-type]  # it is called on this class alone

    def taken_tokens(self) -> list[dict[str, Any]]:
        """Return the tokens that clients were not told yet, once."""
        taken, self._tokens = self._tokens, []
        return taken


_COUNTS: Final = frozenset({"reasoning", "cached", "cache_write", "total"})


class _ChatStep(BothContexts):
    """A step of a chat's turn. Everything else is the step's own."""

    def __init__(self, turn: ChatTurn, step: Step) -> None:
        self._turn = turn
        self._step = step
        self._messages: list[dict[str, Any]] = []
        self._asked: dict[str, Mapping[str, Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)

    def __enter__(self) -> _ChatStep:
        self._step.__enter__()
        return self

    def say(self, *messages: Any) -> None:
        """Append messages when the step commits, with the ids under which they were streamed."""
        self._step.say()  # raises outside of the block
        self._messages += [copy_json(dict(message)) for message in messages]

    def wait_for(self, calls: Mapping[str, Any]) -> None:
        """Suspend the session until calls are answered, as `Step.wait_for` does."""
        self._step.wait_for(calls)
        self._asked.update(calls)

    def ask_approval(self, call_id: str, tool_name: str, input: Any, **options: Any) -> None:
        """Suspend the session until a call is decided, as `Step.ask_approval` does."""
        self._step.ask_approval(call_id, tool_name, input, **options)
        self._asked[call_id] = {"tool_name": tool_name, "input": input, "approval_id": call_id}

    asay = async_twin(say)
    await_for = async_twin(wait_for)
    aask_approval = async_twin(ask_approval)  # type: ignore[arg-type]  # its options are those of `Step`

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        writer = self._turn.writer
        if error is not None:
            try:
                return self._step.__exit__(kind, error, trace)
            finally:
                _take_back(writer)
        try:
            is_shown = self._say(writer)
        except BaseException as exc:
            self._step.__exit__(type(exc), exc, exc.__traceback__)
            _take_back(writer)
            raise
        try:
            self._step.__exit__(None, None, None)
        except BaseException:
            _take_back(writer)
            raise
        self._committed(writer, is_shown=is_shown)
        return False

    def _say(self, writer: Writer) -> bool:
        messages, is_shown = writer.matched(
            self._messages, asked=self._asked, results=self._turn._answers, usage=self._turn._tokens
        )
        self._step.say(*messages)
        self._messages = messages
        writer.flush()
        return is_shown

    def _committed(self, writer: Writer, *, is_shown: bool) -> None:
        turn, state = self._turn, self._step.state
        turn.has_committed = True
        turn._note_received(self._step.received)
        chunk: dict[str, Any] = {
            "said": [head for message in self._messages for head in _heads(message)],
            "received": writer.taken_received([own_id(message) or "" for message in self._step.received]),
            "asked": [_question(call_id, call) for call_id, call in self._asked.items()],
        }
        if usage := turn.taken_tokens():
            chunk["usage"] = usage
        if turn._shares_state:
            chunk["state"] = turn_state = _change(turn._shared, state)
            if turn_state:
                turn._shared = copy_json(state.custom_state)
        connection = connections[turn._chat_store.alias]
        if connection.in_atomic_block:
            # If the caller rolls its transaction back, this commit and its chunk are gone together.
            writer.forget()
            transaction.on_commit(writer.remember, using=connection.alias)
        writer.committed(chunk, is_shown=is_shown)


def _take_back(writer: Writer) -> None:
    writer.reset()
    try:
        writer.flush()
    except HelixStoreError as exc:
        # The error of the step propagates, and the end of the turn tells readers what is stored.
        _logger.info("A reset was not written to the stream (%s).", type(exc).__name__)


def _heads(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what a reader needs of a message that it has streamed, and of each result in it."""
    for entry in entries_of(message, 0):
        head: dict[str, Any] = {"id": entry.id, "role": entry.role}
        if entry.role == "tool":
            head["call"] = entry.call_id
        if entry.approval is not None:
            head["approval"] = entry.approval
        yield head


def _question(call_id: str, call: Mapping[str, Any]) -> dict[str, Any]:
    question = {
        "id": call_id,
        "name": call["tool_name"],
        "digest": call_digest(call["tool_name"], call.get("input")),
    }
    approval_id = call.get("approval_id") or (call_id if call.get("on_expiry") == "reject" else None)
    return question if approval_id is None else {**question, "approval": approval_id}


# --- The shared state --------------------------------------------------------------------------------


def digest_of(state: Any) -> str:
    """Return a short digest of a custom state, by which a reader knows whether a patch applies to its own."""
    text = json.dumps(state, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _change(before: Any, state: SessionState) -> dict[str, Any]:
    operations = list(patch(before, state.custom_state))
    if not operations:
        return {}
    change: dict[str, Any] = {"was": digest_of(before), "now": digest_of(state.custom_state)}
    if len(json.dumps(operations)) <= _LONGEST_PATCH:
        change["patch"] = operations
    return change


def patch(before: Any, after: Any, path: str = "") -> Iterator[dict[str, Any]]:
    """Yield the operations of a JSON patch from one value to another. Lists are replaced as a whole."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before:
            if key not in after:
                yield {"op": "remove", "path": f"{path}/{_escaped(key)}"}
        for key, value in after.items():
            if key not in before:
                yield {"op": "add", "path": f"{path}/{_escaped(key)}", "value": value}
            else:
                yield from patch(before[key], value, f"{path}/{_escaped(key)}")
    elif digest_of(before) != digest_of(after):
        yield {"op": "replace", "path": path, "value": after}


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def out_of(turn: ChatTurn) -> Out:
    return Out(turn.writer)
