"""Peers on the same server, by the optional extra ``bench``.

langgraph-checkpoint-postgres (MIT) and openai-agents (MIT) with SQLAlchemy (MIT) and asyncpg (Apache-2.0) do
less than a step of ours: neither checks a version or numbers messages, and the second keeps no state.
"""

from __future__ import annotations

import importlib
from functools import partial
from importlib.util import find_spec
from typing import Any

from benchmarks.bench import Bench
from benchmarks.evidence import Evidence
from benchmarks.operations import Operation
from benchmarks.races import Client
from benchmarks.server import create_database

__all__ = ["ADD_ITEMS", "PUT", "PUT_AND_WRITE", "PUT_AND_WRITE_HISTORY", "peer_tables"]

_LANGGRAPH = "benchmarks.peers.langgraph"
_OPENAI_AGENTS = "benchmarks.peers.openai_agents"
_NEEDS = {
    _LANGGRAPH: {"langgraph-checkpoint-postgres": "langgraph.checkpoint.postgres"},
    _OPENAI_AGENTS: {"openai-agents": "agents", "SQLAlchemy": "sqlalchemy", "asyncpg": "asyncpg"},
}


def peer_tables(bench: Bench) -> None:
    """A database with the tables of the peers that are installed."""
    create_database(bench.cluster, "peers", is_empty=True)
    for module in _NEEDS:
        if _missing(module) is None:
            importlib.import_module(module).create_tables()


def make_peer(worker: int, *, module: str, name: str, **options: Any) -> Operation:
    """An operation of a module that can be imported only where the peer is installed."""
    operation: Operation = getattr(importlib.import_module(module), name)(worker, **options)
    return operation


def _missing(module: str) -> str | None:
    missing = [package for package, name in _NEEDS[module].items() if not _is_installed(name)]
    if not missing:
        return None
    return f"{', '.join(missing)} not installed; pip install -e .[bench] brings the peers"


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _langgraph(evidence: tuple[int, ...], **options: Any) -> Client:
    return Client(
        operation=partial(make_peer, module=_LANGGRAPH, name="SaveCheckpoint", **options),
        evidence=Evidence(
            """
            SELECT (SELECT count(*) FROM checkpoints), (SELECT count(*) FROM checkpoint_blobs),
                (SELECT count(*) FROM checkpoint_writes)""",
            evidence,
            "peers",
        ),
        missing=_missing(_LANGGRAPH),
    )


PUT = _langgraph((1, 1, 0), is_writing=False)
PUT_AND_WRITE = _langgraph((1, 1, 2))
PUT_AND_WRITE_HISTORY = _langgraph((1, 2, 2), history=1_000, threads=8)
ADD_ITEMS = Client(
    operation=partial(make_peer, module=_OPENAI_AGENTS, name="AddItems"),
    evidence=Evidence("SELECT count(*) FROM agent_messages", (2,), "peers"),
    missing=_missing(_OPENAI_AGENTS),
)
