"""Runs the agents of all frameworks once on the project's database: ``python -m example_project.frameworks``.

Their sessions are then in the admin.
"""

from __future__ import annotations

import asyncio
import os

import django


def run_langgraph() -> None:
    from langchain_core.runnables import RunnableConfig
    from langgraph.types import Command

    from example_project.frameworks.langgraph import travel_agent
    from helix_store.contrib.langgraph import DjangoSaver, UsageRecorder

    saver = DjangoSaver()
    saver.delete_thread("langgraph-example")
    config: RunnableConfig = {
        "configurable": {"thread_id": "langgraph-example"},
        "callbacks": [UsageRecorder()],
    }
    agent = travel_agent(saver, "A flight to Lisbon for 120 euros.", "It is booked.")
    paused = agent.invoke({"messages": [("user", "To Lisbon, please.")]}, config)
    print(paused["__interrupt__"][0].value)
    print(agent.invoke(Command(resume="Yes."), config)["messages"][-1].content)


async def run_claude_agent() -> None:
    from example_project.frameworks.claude_agent import key_of, talk
    from helix_store.contrib.claude_agent import DjangoSessionStore

    store = DjangoSessionStore()
    await store.delete(key_of("claude-example"))
    await talk(store, "claude-example", "What is in this folder?", "An app.")
    print(len(await store.load(key_of("claude-example")) or []), "entries")


def run_strands() -> None:
    from example_project.frameworks.strands import agent_of
    from helix_store.contrib.strands import DjangoSessionRepository

    print(agent_of("strands-example", DjangoSessionRepository())("How is Lisbon?"))


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


if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")
    django.setup()
    main()
