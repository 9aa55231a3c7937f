"""Graphs and other agents that run inside ``atomic()``, one cell of a table after the other, with a watchdog.

A cell that hangs writes the stacks of all threads into the report and ends its process.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, copy_context
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from agents import Agent, Runner, set_tracing_disabled
from asgiref.sync import async_to_sync
from django.contrib.admin.models import LogEntry
from django.db import connections, transaction
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Send, interrupt
from pydantic_ai.conversation import Conversation

from example_project.frameworks.openai_agents import ScriptedModel
from example_project.frameworks.strands import agent_of
from helix_store.contrib.claude_agent import DjangoSessionStore
from helix_store.contrib.langgraph import DjangoSaver, UsageRecorder
from helix_store.contrib.openai_agents import DjangoSession
from helix_store.contrib.pydantic_ai import DjangoConversationStore
from helix_store.contrib.strands import DjangoSessionRepository
from helix_store.items import ItemLog
from helix_store.models import Session
from helix_store.stores import DatabaseStateStore, DatabaseUsageStore
from tests.frameworks.pydantic_ai.conversations import turn

__all__ = ["CELLS", "Cell", "run_cells"]

SHAPES: Final = ("one node", "parallel tools", "subgraph", "interrupt")
CALLS: Final = ("invoke", "stream", "ainvoke", "ainvoke of async nodes", "asyncio.run")
ROWS: Final = ("nothing", "the session")
_HANGS_AFTER_SECONDS: Final = 12.0
_TOOLS: Final = 3


class Cell(NamedTuple):
    shape: str
    recorder: bool
    call: str
    writes: str
    """What the block has written before the call."""


OTHERS: Final = [
    Cell(framework, False, call, writes)
    for framework, calls in {
        "openai": ("run_sync", "asyncio.run", "async_to_sync"),
        "claude": ("asyncio.run", "async_to_sync"),
        "pydantic": ("asyncio.run", "async_to_sync"),
        "strands": ("agent()",),
        "a thread": ("empty context", "copied context", "polled"),
    }.items()
    for call in calls
    for writes in ROWS
]
"""Runs of the other frameworks, and of a thread that the caller starts."""
CELLS: Final = [
    *(Cell(*each) for each in itertools.product(SHAPES, (False, True), CALLS, ROWS)),
    *OTHERS,
]


@tool
def look_up(city: str) -> str:
    """Look a city up."""
    return f"It rains in {city}."


@tool
async def look_up_async(city: str) -> str:
    """Look a city up."""
    return f"It rains in {city}."


def agent(shape: str, saver: BaseCheckpointSaver[Any], *, is_async: bool) -> Any:
    usage: Any = {"input_tokens": 120, "output_tokens": 20, "total_tokens": 140}
    name = look_up_async.name if is_async else look_up.name
    calls = [{"name": name, "args": {"city": "Kyoto"}, "id": f"c{n}"} for n in range(_TOOLS)]
    asked = AIMessage(content="", tool_calls=calls, usage_metadata=usage)
    said = [asked, *(AIMessage(content="Yes.", usage_metadata=usage) for _ in range(9))]
    model = GenericFakeChatModel(messages=iter(said if shape == "parallel tools" else said[1:]))

    def think(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    async def think_async(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [("user", interrupt("Book it?"))]}

    def to_tools(state: MessagesState) -> Any:
        called = getattr(state["messages"][-1], "tool_calls", [])
        return [Send("tools", [call]) for call in called] or END

    node: Any = think_async if is_async else think
    graph = StateGraph(MessagesState)
    graph.add_node("agent", node)
    graph.add_edge(START, "agent")
    match shape:
        case "parallel tools":
            graph.add_node("tools", ToolNode([look_up_async if is_async else look_up]))
            graph.add_conditional_edges("agent", to_tools, ["tools", END])
            graph.add_edge("tools", "agent")
        case "subgraph":
            inner = StateGraph(MessagesState)
            for each in ("first", "second"):
                inner.add_node(each, node)
                inner.add_edge(START, each)
            graph.add_node("inner", inner.compile())
            graph.add_edge("agent", "inner")
        case "interrupt":
            graph.add_node("ask", ask)
            graph.add_node("beside", node)
            graph.add_edge("agent", "ask")
            graph.add_edge("agent", "beside")
        case _:
            graph.add_edge("agent", END)
    return graph.compile(checkpointer=saver)


def run_other(cell: Cell, session_id: str, alias: str, tenant: str) -> str:
    """Run another framework in a block and roll the block back."""
    options: Any = {"using": alias, "tenant": tenant}
    stored_id, given = session_id, {"role": "user", "content": "hi"}
    if cell.shape == "claude":
        stored_id = DjangoSessionStore.session_id_of({"project_key": "p", "session_id": session_id})
    repository = DjangoSessionRepository(**options)
    with transaction.atomic(using=alias):
        if cell.writes == "the session":
            DatabaseStateStore(alias, tenant=tenant).create_session(stored_id, agent_type="t")
        elif connections[alias].vendor == "sqlite":
            # Any write of the application locks SQLite.
            LogEntry.objects.using(alias).filter(pk=-1).delete()
        match cell.shape:
            case "openai":
                guide: Any = Agent(name="guide", model=ScriptedModel("Yes."))
                session = DjangoSession(session_id, **options)
                if cell.call == "run_sync":
                    Runner.run_sync(guide, "hi", session=session)
                else:
                    _called(cell.call, lambda: Runner.run(guide, "hi", session=session))
            case "claude":
                store, key = DjangoSessionStore(**options), {"project_key": "p", "session_id": session_id}
                entry: Any = {"type": "user", "uuid": "u1", "message": given}
                _called(cell.call, lambda: store.append(cast("Any", key), [entry]))
            case "pydantic":
                conversation = Conversation(conversation_id=session_id)
                turn(conversation, "hi")
                _called(cell.call, lambda: DjangoConversationStore(**options).save(conversation))
            case "strands":
                agent_of(session_id, repository)("hi")
            case _:
                log = ItemLog(session_id, using=alias, tenant=tenant)
                context = copy_context() if cell.call == "copied context" else Context()
                with ThreadPoolExecutor(1) as threads:
                    appended = threads.submit(context.run, log.append, [1])
                    while cell.call == "polled" and not appended.done():
                        # A thread that is busy, as far as anybody can see.
                        time.sleep(0.01)
                    appended.result()
        transaction.set_rollback(True, using=alias)
    return "stored"


def _called(bridge: str, call: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    async def run_it() -> None:
        await call()

    if bridge == "asyncio.run":
        asyncio.run(run_it())
    else:
        async_to_sync(run_it)()


def run(cell: Cell, thread_id: str, alias: str, tenant: str) -> str:
    """Run a graph in a block and roll the block back; return what was stored."""
    saver = DjangoSaver(alias, tenant=tenant)
    graph = agent(cell.shape, saver, is_async="async nodes" in cell.call)
    recorder = UsageRecorder(alias, tenant=tenant)
    config: Any = {"configurable": {"thread_id": thread_id}, "callbacks": [recorder] * cell.recorder}
    given = {"messages": [("user", "To Kyoto")]}
    with transaction.atomic(using=alias):
        if cell.writes == "the session":
            DatabaseStateStore(alias, tenant=tenant).create_session(thread_id, agent_type="langgraph")
        match cell.call:
            case "invoke":
                graph.invoke(given, config)
            case "stream":
                list(graph.stream(given, config))
            case "asyncio.run":
                asyncio.run(graph.ainvoke(given, config))
            case _:
                async_to_sync(graph.ainvoke)(given, config)
        stored = saver.get_tuple(config)
        rollup = DatabaseUsageStore(alias, tenant=tenant).get_rollup(thread_id)
        transaction.set_rollback(True, using=alias)
        if stored is None:
            return "nothing is stored"
        return f"stored, {0 if rollup is None else rollup.entry_count} calls recorded"


def run_cells(numbers: list[int], report: str, alias: str, tenant: str) -> None:
    """Run cells by their index in `CELLS`, and add a line of JSON for each to the report."""
    logging.getLogger("langchain_core").setLevel(logging.ERROR)
    set_tracing_disabled(True)
    # Modules are imported when they are first needed.
    agent("one node", DjangoSaver(alias, tenant=tenant), is_async=False).invoke(
        {"messages": [("user", "To Kyoto")]},
        {"configurable": {"thread_id": "warm"}, "callbacks": [UsageRecorder(alias, tenant=tenant)]},
    )
    for cell in OTHERS:
        if cell.call == "async_to_sync":
            run_other(cell, "warm other", alias, tenant)
    for number in numbers:
        began = time.monotonic()
        done = threading.Event()
        watchdog = threading.Thread(target=_watch, args=(done, number, report), daemon=True)
        watchdog.start()
        try:
            cell = CELLS[number]
            outcome = (run_other if cell in OTHERS else run)(cell, f"t{number}", alias, tenant)
        except Exception as exc:  # noqa: BLE001  the parent judges it
            outcome = type(exc).__name__
        seconds = time.monotonic() - began
        done.set()
        watchdog.join()
        left = Session.objects.using(alias).filter(tenant=tenant).exclude(session_id="warm")
        is_left = bool(left.delete()[0])
        connections.close_all()
        _say(report, number, outcome=outcome, seconds=seconds, is_left=is_left)


def _watch(done: threading.Event, number: int, report: str) -> None:
    if done.wait(_HANGS_AFTER_SECONDS):
        return
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = [
        f"{names.get(ident)}\n{''.join(traceback.format_stack(frame)[-12:])}"
        for ident, frame in sys._current_frames().items()
    ]
    _say(report, number, outcome="hangs", seconds=_HANGS_AFTER_SECONDS, stacks="\n".join(stacks))
    os._exit(1)


def _say(report: str, number: int, **outcome: Any) -> None:
    with Path(report).open("a") as file:
        file.write(json.dumps({"number": number, **outcome}) + "\n")
