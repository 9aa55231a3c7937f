"""A LangGraph agent that asks a person before it books. Its thread is a session in the project's database.

The model is a script, so that no network is needed.
"""

from __future__ import annotations

from typing import Any

from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import interrupt

__all__ = ["travel_agent"]


def travel_agent(checkpointer: BaseCheckpointSaver[Any], *answers: str) -> Any:
    """Return a graph that gives ``answers`` one after the other, and waits for an approval in between."""
    usage: Any = {"input_tokens": 120, "output_tokens": 20, "total_tokens": 140}
    said = (AIMessage(content=answer, usage_metadata=usage) for answer in answers)
    model = GenericFakeChatModel(messages=said)

    def think(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    def approve(state: MessagesState) -> dict[str, Any]:
        decision = interrupt({"question": "Book it?", "offer": state["messages"][-1].content})
        return {"messages": [("user", decision)]}

    graph = StateGraph(MessagesState)
    graph.add_node("offer", think)
    graph.add_node("approve", approve)
    graph.add_node("book", think)
    graph.add_edge(START, "offer")
    graph.add_edge("offer", "approve")
    graph.add_edge("approve", "book")
    graph.add_edge("book", END)
    return graph.compile(checkpointer=checkpointer)
