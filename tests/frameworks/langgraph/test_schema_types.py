"""Types in the state of a graph: those of its schema come back as they were, others as plain data."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, TypedDict

from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt
from pydantic import BaseModel

from helix_store.contrib.langgraph import DjangoSaver
from tests.databases import CommittedDatabase


class Size(Enum):
    SMALL = "small"


@dataclass
class Stop:
    city: str
    size: Size = Size.SMALL


@dataclass
class Trip:
    stops: list[Stop] = field(default_factory=list)


class Budget(BaseModel):
    euros: int


@dataclass
class NotInSchema:
    text: str


class State(TypedDict):
    trip: Annotated[Trip, "the trip"]
    budget: Budget | None
    other: Any


def graph_of(saver: Any) -> Any:
    builder = StateGraph(State)
    builder.add_node("ask", lambda state: {"other": [interrupt("ok?"), type(state["trip"]).__name__]})
    builder.add_edge(START, "ask")
    builder.add_edge("ask", END)
    return builder.compile(checkpointer=saver)


def saver_of(database: CommittedDatabase) -> DjangoSaver:
    return DjangoSaver(database.alias, tenant=database.tenant)


CONFIG: Any = {"configurable": {"thread_id": "trip"}}
TRIP = Trip([Stop("Kyoto")])


def test_types_of_the_schema_come_back_after_a_resume(committed_db: CommittedDatabase) -> None:
    graph_of(saver_of(committed_db)).invoke({"trip": TRIP, "budget": Budget(euros=5), "other": 1}, CONFIG)
    graph = graph_of(saver_of(committed_db))
    found = graph.invoke(Command(resume="yes"), CONFIG)
    assert found == {"trip": TRIP, "budget": Budget(euros=5), "other": ["yes", "Trip"]}
    assert graph.get_state(CONFIG).values == found


def test_a_type_outside_of_the_schema_comes_back_as_plain_data(committed_db: CommittedDatabase) -> None:
    state = {"trip": TRIP, "budget": None, "other": NotInSchema("x")}
    graph_of(saver_of(committed_db)).invoke(state, CONFIG)
    assert graph_of(saver_of(committed_db)).get_state(CONFIG).values["other"] == {"text": "x"}


def test_the_types_of_an_entrypoint_come_back(committed_db: CommittedDatabase) -> None:
    @entrypoint(checkpointer=saver_of(committed_db))
    def extend(stop: Stop, *, previous: Trip | None = None) -> Trip:
        return Trip([*(previous or Trip()).stops, stop])

    extend.invoke(Stop("Kyoto"), CONFIG)
    assert extend.invoke(Stop("Nara"), CONFIG) == Trip([Stop("Kyoto"), Stop("Nara")])


def test_other_savers_read_what_they_read_before() -> None:
    DjangoSaver()
    graph = graph_of(InMemorySaver())
    graph.invoke({"trip": TRIP, "budget": None, "other": NotInSchema("x")}, CONFIG)
    assert graph.get_state(CONFIG).values["other"] == NotInSchema("x")
