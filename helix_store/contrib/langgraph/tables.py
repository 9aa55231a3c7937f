"""How export, branches and the doctor treat the tables of LangGraph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from django.db.models import Model

from helix_store.app_tables import AppTable, Branch, register_table
from helix_store.contrib.langgraph import sql
from helix_store.contrib.langgraph.memories import sweep
from helix_store.contrib.langgraph.models import (
    LangGraphCheckpoint,
    LangGraphMemory,
    LangGraphValue,
    LangGraphWrite,
)
from helix_store.engine.database import Database
from helix_store.engine.expressions import list_parameter
from helix_store.engine.statement import Statement
from helix_store.exceptions import shown_id

__all__ = ["register_tables"]


def register_tables() -> None:
    copy_checkpoints, copy_values, copy_writes = map(_copy_to_branch, sql.COPY_PARTS)
    register_table(
        AppTable(
            LangGraphCheckpoint,
            record="langgraph_checkpoint",
            order=("namespace", "checkpoint_id"),
            branch=copy_checkpoints,
            check=_lost_values,
        )
    )
    register_table(
        AppTable(
            LangGraphValue,
            record="langgraph_value",
            order=("namespace", "channel", "version"),
            branch=copy_values,
        )
    )
    register_table(
        AppTable(
            LangGraphWrite,
            record="langgraph_write",
            order=("namespace", "checkpoint_id", "task_id", "position"),
            branch=copy_writes,
        )
    )
    register_table(
        AppTable(
            LangGraphMemory,
            record="langgraph_memory",
            order=("namespace", "key"),
            parent="tenant",
            sweep=sweep,
        )
    )


def _copy_to_branch(statement: Statement) -> Callable[[type[Model], Branch], None]:
    def copy(model: type[Model], branch: Branch) -> None:
        """A branch of a session is a copy of the thread, with the id of the branch."""
        names = {"tenant": branch.db.tenant, "session_id": branch.source_id}
        branch.db.execute(statement, {**names, "target": branch.target, "thread_id": None})

    return copy


def _lost_values(db: Database, keys: Collection[int]) -> Iterator[tuple[int, str]]:
    for key, checkpoint_id, channel in db.execute(sql.LOST_VALUES, {"ids": list_parameter(db, list(keys))}):
        yield (
            key,
            f"the LangGraph checkpoint {shown_id(checkpoint_id)} refers to a value of the channel "
            f"{shown_id(channel)} that is not stored",
        )
