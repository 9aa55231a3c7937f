"""Run the agents of all frameworks once on the project's database: ``python -m example_project.frameworks``.

Their sessions are then in the admin, all of the user ada.
"""

from __future__ import annotations

import asyncio
import os
from importlib.util import find_spec

import django


def run_langgraph() -> None:
    from langchain_core.runnables import RunnableConfig
    from langgraph.types import Command

    from example_project.frameworks.langgraph import travel_agent
    from helix_store.contrib.langgraph import DjangoSaver, UsageRecorder

    saver = DjangoSaver()
    saver.delete_thread("langgraph-example")
    config: RunnableConfig = {
        "configurable": {"thread_id": "langgraph-example", "user_id": "ada"},
        "callbacks": [UsageRecorder()],
    }
    agent = travel_agent(saver, "A flight to Lisbon for 120 euros.", "It is booked.")
    paused = agent.invoke({"messages": [("user", "To Lisbon, please.")]}, config)
    print(paused["__interrupt__"][0].value)
    print(agent.invoke(Command(resume="Yes."), config)["messages"][-1].content)


async def run_claude_agent() -> None:
    from example_project.frameworks.claude_agent import key_of, talk
    from helix_store.contrib.claude_agent import DjangoClaudeSessions

    store = DjangoClaudeSessions(user_id="ada")
    await store.delete(key_of("claude-example"))
    await talk(store, "claude-example", "What is in this folder?", "An app.")
    print(len(await store.load(key_of("claude-example")) or []), "entries")


def run_strands() -> None:
    from example_project.frameworks.strands import agent_of
    from helix_store.contrib.strands import DjangoSessionRepository

    print(agent_of("strands-example", DjangoSessionRepository(user_id="ada"))("How is Lisbon?"))


async def run_google_adk() -> None:
    from example_project.frameworks.google_adk import APP, ask, runner_of
    from helix_store.contrib.google_adk import DjangoSessionService

    service = DjangoSessionService()
    await service.delete_session(app_name=APP, user_id="ada", session_id="example")
    await service.create_session(
        app_name=APP, user_id="ada", session_id="example", state={"user:home": "Porto"}
    )
    print(await ask(runner_of(service), "ada", "example", "How is Lisbon?"))


async def run_agent_framework() -> None:
    from agent_framework import AgentSession

    from example_project.frameworks.agent_framework import Offer, booking, guide
    from helix_store.contrib.agent_framework import (
        DjangoAgentSessions,
        DjangoCheckpointStorage,
        DjangoHistoryProvider,
    )

    name = "agent-framework-example"
    sessions = DjangoAgentSessions(user_id="ada")
    await sessions.delete(name)
    session = AgentSession(session_id=name)
    agent = guide(DjangoHistoryProvider(user_id="ada"))
    print(await agent.run("How is Lisbon?", session=session))
    await sessions.set(name, session)

    offer = f"{Offer.__module__}:{Offer.__qualname__}"
    storage = DjangoCheckpointStorage(name, user_id="ada", allowed_checkpoint_types=[offer])
    (asked,) = (await booking().run("Lisbon", checkpoint_storage=storage)).get_request_info_events()
    latest = await storage.get_latest(workflow_name="booking")
    if latest is not None:
        resumed = await booking().run(
            checkpoint_id=latest.checkpoint_id,
            checkpoint_storage=storage,
            responses={asked.request_id: True},
        )
        print(*resumed.get_outputs())


def main() -> None:
    from example_project.frameworks import openai_agents, pydantic_ai

    print("LangGraph")
    run_langgraph()
    print("OpenAI Agents SDK")
    asyncio.run(openai_agents.main())
    print("Claude Agent SDK")
    asyncio.run(run_claude_agent())
    print("Pydantic AI")
    asyncio.run(pydantic_ai.main())
    print("Strands Agents")
    run_strands()
    for name, package, run in (
        ("Google ADK", "google.adk", run_google_adk),
        ("Microsoft Agent Framework", "agent_framework", run_agent_framework),
    ):
        print(name)
        if _is_installed(package):
            asyncio.run(run())
        else:
            print("is not installed")


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")
    django.setup()
    main()
