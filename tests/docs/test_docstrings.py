"""Every public class ends its docstring with an example, and the examples run on each database.

An example follows the imports below, and may use ``await``. One of the root also finds ``store`` and
``session`` from ``STORED``, and one of an adapter finds the names of ``FRAMEWORKS``.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import traceback
from collections.abc import Coroutine, Iterator
from importlib import import_module
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import transaction
from django.test import override_settings

import helix_store
from tests.admin.conftest import EverythingOn
from tests.cells import Cells
from tests.databases import CommittedDatabase, delete_all_rows
from tests.test_layout import NOT_IN_DEV

IMPORTS = """
from datetime import UTC, date, datetime, timedelta
from django.core.files.base import ContentFile
from django.core.files.storage import InMemoryStorage
from django.urls import path
from helix_store import *
"""

STORED = """
store = Store()
session = store.new_session("trip", agent_type="planner", user_id="ada", title="A trip to Kyoto")
session.say({"role": "user", "content": "To Kyoto, please."})
with session.effect("call-0", tool_name="reserve", input={"to": "Kyoto"}) as effect:
    effect.done({"seat": "12A"})
with session.turn() as turn, turn.step() as step:
    turn.tokens(model="gpt-4o", prompt=120, completion=30)
    step.say({"role": "assistant", "content": "By train or by plane?"})

booking = store.new_session("booking", agent_type="planner", user_id="ada")
with booking.turn() as turn, turn.step() as step:
    step.ask_approval("call-1", "book", {"to": "Kyoto"}, deadline=timedelta(days=1))
"""
"""What an example finds in the database: a session after one step, and one that waits for an approval."""

FRAMEWORKS = {
    "agent_framework": """
from agent_framework import Agent, AgentSession
from example_project.frameworks.agent_framework import Offer, ScriptedClient, booking, weather
client = ScriptedClient()
workflow = booking()
""",
    "claude_agent": "from claude_agent_sdk import ClaudeAgentOptions, list_sessions_from_store",
    "google_adk": """
from example_project.frameworks.google_adk import ScriptedModel
from google.adk.agents import LlmAgent
from google.adk.runners import Runner
agent = LlmAgent(name="guide", model=ScriptedModel())
""",
    "langgraph": """
from example_project.frameworks.langgraph import travel_agent
builder = travel_agent(None, "The train at 10:03 costs 90 euros.").builder
""",
    "openai_agents": """
from agents import Agent, Runner, RunState, set_tracing_disabled
from example_project.frameworks.openai_agents import ScriptedModel, send_money
set_tracing_disabled(True)
agent = Agent(name="guide", model=ScriptedModel("Paris."))
banker = Agent(name="banker", model=ScriptedModel("send_money()"), tools=[send_money])
""",
    "pydantic_ai": """
from pydantic_ai import Agent
from pydantic_ai.conversation import Conversation
from pydantic_ai.models.test import TestModel
agent = Agent(TestModel(custom_output_text="Lisbon is sunny."))
""",
    "strands": """
from example_project.frameworks.strands import ScriptedModel, weather
from strands import Agent
from strands.session import RepositorySessionManager, SnapshotSessionManager
model = ScriptedModel()
""",
}
"""What the reader of an adapter's example has: the framework's names and an agent, which needs no network."""

WITHOUT_EXAMPLE = dict.fromkeys(
    ("LockManager", "StateStore", "UsageStore", "WorkspaceProvider"),
    "a protocol has no instances; the classes that implement it have examples",
)


def public_classes() -> dict[str, type]:
    """Return the classes of the root, of the adapters that are installed, and `Chat`, by path."""
    found = {f"helix_store.{name}": getattr(helix_store, name) for name in helix_store.__all__}
    for framework in FRAMEWORKS:
        package = f"helix_store.contrib.{framework}"
        try:
            import_module(NOT_IN_DEV.get(package, "django"))
        except ImportError:
            continue
        adapters = import_module(package)
        found |= {f"{package}.{name}": getattr(adapters, name) for name in adapters.__all__}
    found["helix_store.contrib.chat.Chat"] = import_module("helix_store.contrib.chat").Chat
    return {
        path: value
        for path, value in found.items()
        if inspect.isclass(value)
        and path.endswith(f".{value.__name__}")  # not an alias
        and not issubclass(value, BaseException)  # the docstring of an error is its message
        and value.__name__ not in WITHOUT_EXAMPLE
    }


def example_of(public: type) -> str:
    """Return the code at the end of the class's own docstring."""
    docstring = inspect.cleandoc(vars(public).get("__doc__") or "")
    _, heading, code = docstring.rpartition("\n\nExample::\n\n")
    assert heading, "The docstring has no example."
    unindented = [line for line in code.splitlines() if line and not line.startswith("    ")]
    assert not unindented, "The example is not the end of the docstring."
    return textwrap.dedent(code)


@pytest.fixture
def emptied(empty_db: CommittedDatabase) -> Iterator[CommittedDatabase]:
    """A database without rows, before and after the test, which ``Store()`` uses."""
    with override_settings(DATABASE_ROUTERS=[EverythingOn(empty_db.alias)]):
        try:
            yield empty_db
        finally:
            delete_all_rows(empty_db.alias)


def test_only_protocols_have_no_example() -> None:
    assert all(getattr(helix_store, name)._is_protocol for name in WITHOUT_EXAMPLE)


def test_a_class_without_an_example_is_found() -> None:
    class Silent(helix_store.Store):
        """All stores, without an example of its own."""

    with pytest.raises(AssertionError, match="has no example"):
        example_of(Silent)


def test_the_example_of_each_public_class_runs(emptied: CommittedDatabase) -> None:
    """Each example of the root finds the same rows, because what it writes is rolled back.

    The frameworks write in threads of their own, which a transaction cannot include.
    """
    names: dict[str, Any] = {}
    exec(IMPORTS + STORED, names)  # noqa: S102  the code above
    with Cells() as cells:
        for path, public in public_classes().items():
            package = path.rpartition(".")[0]
            with cells.check(path):
                if package == "helix_store":
                    with transaction.atomic(using=emptied.alias):
                        run(example_of(public), {**names})
                        transaction.set_rollback(True, using=emptied.alias)
                else:
                    prepared: dict[str, Any] = {}
                    framework = FRAMEWORKS.get(package.rpartition(".")[2], "")
                    exec(f"{IMPORTS}\nfrom {package} import *\n{framework}", prepared)  # noqa: S102
                    delete_all_rows(emptied.alias)
                    run(example_of(public), prepared)


def run(code: str, names: dict[str, Any]) -> None:
    """Run an example, as the body of a coroutine if it awaits."""
    compiled = compile(code, "<example>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    try:
        if compiled.co_flags & inspect.CO_COROUTINE:
            async_to_sync(_awaited)(eval(compiled, names))  # noqa: S307  our own documentation
        else:
            exec(compiled, names)  # noqa: S102
    except Exception as error:
        frames = traceback.walk_tb(error.__traceback__)
        number = max(number for frame, number in frames if frame.f_code.co_filename == "<example>")
        statement = code.splitlines()[number - 1].strip()
        raise AssertionError(f"{statement}: {type(error).__name__}: {error}") from error


async def _awaited(coroutine: Coroutine[Any, Any, None]) -> None:
    await coroutine
