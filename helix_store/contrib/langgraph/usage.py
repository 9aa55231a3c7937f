"""`UsageRecorder`, which records the usage of a graph's models and tools in the usage ledger."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, LLMResult
from langgraph.errors import GraphBubbleUp

from helix_store.adapters import SessionAdapter, session_id_for
from helix_store.contrib.item_storage import hour_long_cost
from helix_store.contrib.langgraph.encoding import AGENT_TYPE, CheckpointAddress, about_thread
from helix_store.core.types import UsageKind
from helix_store.core.usage import TokenCounts, UsageEntry, UsageSource
from helix_store.engine.async_twins import async_twin, in_callers_thread
from helix_store.exceptions import SessionNotFound
from helix_store.stores import DatabaseUsageStore

_UNKNOWN: Final = "unknown"
_FOR_FIVE_MINUTES: Final = "ephemeral_5m_input_tokens"
_FOR_AN_HOUR: Final = "ephemeral_1h_input_tokens"
_MODEL_NAMES: Final = ("model_name", "model", "model_id")


class _Call(NamedTuple):
    """A running call of a model or tool."""

    name: str
    metadata: Mapping[str, Any]
    began_ns: int

    def milliseconds(self) -> int:
        return (time.monotonic_ns() - self.began_ns) // 1_000_000


class _InBothWays:
    """A callback that records, which is a coroutine function for an event loop.

    LangChain would run a plain function in a thread of its own, outside of the caller's transaction.
    """

    def __init__(self, callback: Callable[..., None]) -> None:
        self._callback = callback
        self._twin = async_twin(callback)
        self.__doc__ = callback.__doc__

    def __get__(self, instance: UsageRecorder | None, owner: type[UsageRecorder]) -> Any:
        if instance is None:
            return self
        callback: Any = self._twin if _is_in_loop() else self._callback
        return callback.__get__(instance, owner)


def _is_in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class UsageRecorder(BaseCallbackHandler):
    """A callback that records the usage of models and tools in the session of the graph's thread. Pass it in
    the ``callbacks`` of a config to ``invoke`` and ``ainvoke``. One object serves all threads of a tenant.
    The id of an entry is that of the call, so that no call is recorded twice. A call outside of a thread is
    not recorded; neither is a response from LangChain's cache, or a tool that waits for a person.

    Each call is recorded in one transaction after the response. An error does not stop the agent: LangChain
    logs a warning to the logger ``langchain_core.callbacks.manager``. Set ``raise_error`` to raise it. The
    session of an erased thread is not created again, unless ``recreate`` is True. An async graph in the
    caller's transaction records in that transaction.

    Example::

        graph = builder.compile(checkpointer=DjangoSaver())
        config = {"configurable": {"thread_id": "kyoto"}, "callbacks": [UsageRecorder()]}
        graph.invoke({"messages": [("user", "To Kyoto, please.")]}, config)
    """

    # Most events are ends of chains and retrievers, which do not report usage.
    ignore_chain = True
    ignore_retriever = True

    def __init__(self, using: str | None = None, *, tenant: str = "", recreate: bool = False) -> None:
        self._sessions = SessionAdapter(AGENT_TYPE, using, tenant=tenant, recreate=recreate)
        self._ledger = DatabaseUsageStore(using=using, tenant=tenant)
        self._calls: dict[UUID, _Call] = {}
        self._lock = threading.Lock()

    # --- Models ---

    def on_chat_model_start(
        self,
        serialized: dict[str, Any],
        messages: Any,
        *,
        run_id: UUID,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._begin(run_id, str((metadata or {}).get("ls_model_name") or _UNKNOWN), metadata)

    @_InBothWays
    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        call = self._end(run_id)
        message = _message_of(response)
        if call is None or message is None or message.usage_metadata is None:
            return
        usage: Mapping[str, Any] = message.usage_metadata
        # LangChain sets the cost of a response from its cache to zero, and keeps the tokens.
        if usage.get("total_cost") != 0:
            model = _first(message.response_metadata, _MODEL_NAMES) or call.name
            self._record_tokens(run_id, call, session_id_for(model), usage)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        self._end(run_id)

    def _record_tokens(self, run_id: UUID, call: _Call, model: str, usage: Mapping[str, Any]) -> None:
        tokens = _tokens(usage)
        now = time.time_ns() // 1_000_000
        cost = hour_long_cost(model, tokens, now, _detail(usage, "input_token_details", _FOR_AN_HOUR))
        self._record(
            run_id,
            call,
            kind=UsageKind.TOKENS,
            model=model,
            tokens=tokens,
            duration_ms=call.milliseconds(),
            cost_usd=cost,
        )

    # --- Tools ---

    def on_tool_start(
        self,
        serialized: dict[str, Any],
        input_str: str,
        *,
        run_id: UUID,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._begin(run_id, str((serialized or {}).get("name") or _UNKNOWN), metadata)

    @_InBothWays
    def on_tool_end(self, output: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self._record_tool(run_id, success=getattr(output, "status", None) != "error")

    @_InBothWays
    def on_tool_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        if isinstance(error, GraphBubbleUp):
            # This is an interrupt: the tool runs again when it is answered.
            self._end(run_id)
        else:
            self._record_tool(run_id, success=False)

    def _record_tool(self, run_id: UUID, *, success: bool) -> None:
        if call := self._end(run_id):
            self._record(
                run_id,
                call,
                kind=UsageKind.TOOL,
                tool_name=session_id_for(call.name),
                success=success,
                duration_ms=call.milliseconds(),
            )

    # --- Calls ---

    def _begin(self, run_id: UUID, name: str, metadata: Mapping[str, Any] | None) -> None:
        with self._lock:
            self._calls[run_id] = _Call(name, metadata or {}, time.monotonic_ns())

    def _end(self, run_id: UUID) -> _Call | None:
        with self._lock:
            return self._calls.pop(run_id, None)

    def _record(self, run_id: UUID, call: _Call, **fields: Any) -> None:
        if call.metadata.get("thread_id") is None:
            return
        _, session_id = CheckpointAddress.ids_of_thread(call.metadata["thread_id"])
        step = call.metadata.get("langgraph_step")
        agent = _first(call.metadata, ("lc_agent_name", "langgraph_node")) or AGENT_TYPE
        graph_run = _first(call.metadata, ("run_id",))
        entry = UsageEntry(
            id=f"langchain:{run_id}",
            session_id=session_id,
            step_count=step if type(step) is int and step >= 0 else 0,
            run_id=None if graph_run is None else session_id_for(graph_run),
            timestamp=time.time_ns() // 1_000_000,
            source=UsageSource(type="agent", name=session_id_for(agent)),
            **fields,
        )

        def record() -> None:
            try:
                self._ledger.record_entry(entry)
            except SessionNotFound:
                # The saver may write its first checkpoint after the first response.
                self._sessions.ensure(session_id, **about_thread(call.metadata))
                self._ledger.record_entry(entry)

        # A synchronous node of an async graph runs in another thread.
        in_callers_thread(record)


def _message_of(response: LLMResult) -> AIMessage | None:
    """Return the first choice, because each choice of a response reports the usage of all of them."""
    generation = next((choice for choices in response.generations for choice in choices), None)
    message = generation.message if isinstance(generation, ChatGeneration) else None
    return message if isinstance(message, AIMessage) else None


def _tokens(usage: Mapping[str, Any]) -> TokenCounts:
    """Return token counts. Details are parts of the sums: tokens written to a cache count as input too."""
    return TokenCounts(
        prompt=usage["input_tokens"],
        completion=usage["output_tokens"],
        reasoning=_detail(usage, "output_token_details", "reasoning"),
        cached=_detail(usage, "input_token_details", "cache_read"),
        cache_write=_written(usage),
        audio_prompt=_detail(usage, "input_token_details", "audio"),
        audio_completion=_detail(usage, "output_token_details", "audio"),
        total=usage["total_tokens"],
    )


def _written(usage: Mapping[str, Any]) -> int:
    """Return the tokens written to a cache. LangChain's `ChatAnthropic` reports them by their lifetime, and
    the sum as 0.
    """
    lifetimes = (_FOR_FIVE_MINUTES, _FOR_AN_HOUR)
    by_lifetime = sum(_detail(usage, "input_token_details", name) for name in lifetimes)
    return by_lifetime or _detail(usage, "input_token_details", "cache_creation")


def _detail(usage: Mapping[str, Any], part: str, name: str) -> int:
    return (usage.get(part) or {}).get(name) or 0


def _first(given: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    return next((str(given[name]) for name in names if given.get(name)), None)
