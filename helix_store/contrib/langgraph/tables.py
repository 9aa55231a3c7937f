"""The tables of LangGraph's data, for the catalogue."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any, Final

from django.db.models import Model

from helix_store.catalogue import AppTable, Branch
from helix_store.contrib.langgraph import sql
from helix_store.contrib.langgraph.memories import sweep
from helix_store.contrib.langgraph.models import (
    LangGraphCheckpoint,
    LangGraphMemory,
    LangGraphValue,
    LangGraphWrite,
)
from helix_store.contrib.langgraph.plain import PLAIN_TYPES, importable_type
from helix_store.engine.database import Database
from helix_store.engine.expressions import list_parameter
from helix_store.engine.statement import Statement
from helix_store.exceptions import InvalidPayload, shown_id


def _check_type(columns: Mapping[str, Any]) -> None:
    importable_type(columns["type"])


def _check_checkpoint(columns: Mapping[str, Any]) -> None:
    """Check ``versions``, which statements read as JSON: any other text would break every list."""
    _check_type(columns)
    try:
        versions = json.loads(columns["versions"])
    except (ValueError, RecursionError):
        versions = None
    if type(versions) is not dict or not all(type(version) is str for version in versions.values()):
        raise InvalidPayload(path="versions", reason="expected a JSON object of strings")


def _copy_to_branch(statement: Statement, model: type[Model], branch: Branch) -> None:
    """Copy a part of the thread to a branch of its session, under the id of the branch."""
    names = {"tenant": branch.db.tenant, "session_id": branch.source_id}
    branch.db.execute(statement, {**names, "target": branch.target, "thread_id": None})


def _unknown_types(model: type[Model], db: Database, keys: Collection[int]) -> Iterator[tuple[int, str]]:
    rows = model._base_manager.using(db.alias).filter(session_id__in=keys).exclude(type__in=PLAIN_TYPES)
    for key, kind in rows.order_by("session_id", "type").values_list("session_id", "type").distinct():
        try:
            importable_type(kind)
        except InvalidPayload:
            yield (
                key,
                f"rows of {model.__name__} have the type {shown_id(kind)}, which the default serializer "
                "does not read; if a serializer of your own wrote it, name it with register_types",
            )


def _faults_of_checkpoints(db: Database, keys: Collection[int]) -> Iterator[tuple[int, str]]:
    yield from _unknown_types(LangGraphCheckpoint, db, keys)
    for key, checkpoint_id, channel in db.execute(sql.LOST_VALUES, {"keys": list_parameter(db, list(keys))}):
        yield (
            key,
            f"the LangGraph checkpoint {shown_id(checkpoint_id)} refers to a value of the channel "
            f"{shown_id(channel)} that is not stored",
        )


_COPY_CHECKPOINTS, _COPY_VALUES, _COPY_WRITES = (partial(_copy_to_branch, each) for each in sql.COPY_PARTS)
TABLES: Final = (
    AppTable(
        LangGraphCheckpoint,
        record="langgraph_checkpoint",
        order=("namespace", "checkpoint_id"),
        branch=_COPY_CHECKPOINTS,
        check=_faults_of_checkpoints,
        check_import=_check_checkpoint,
    ),
    AppTable(
        LangGraphValue,
        record="langgraph_value",
        order=("namespace", "channel", "version"),
        branch=_COPY_VALUES,
        check=partial(_unknown_types, LangGraphValue),
        check_import=_check_type,
    ),
    AppTable(
        LangGraphWrite,
        record="langgraph_write",
        order=("namespace", "checkpoint_id", "task_id", "position"),
        branch=_COPY_WRITES,
        check=partial(_unknown_types, LangGraphWrite),
        check_import=_check_type,
    ),
    AppTable(
        LangGraphMemory, record="langgraph_memory", order=("namespace", "key"), parent="tenant", sweep=sweep
    ),
)
