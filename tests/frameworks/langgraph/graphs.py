"""Checkpoints as LangGraph writes them, for tests that need no graph."""

from __future__ import annotations

from typing import Any

from langgraph.checkpoint.base import BaseCheckpointSaver, empty_checkpoint

__all__ = ["config_of", "put", "put_chain"]


def config_of(thread_id: str, checkpoint_id: str | None = None, *, namespace: str = "") -> Any:
    configurable = {"thread_id": thread_id, "checkpoint_ns": namespace}
    return {"configurable": configurable | ({"checkpoint_id": checkpoint_id} if checkpoint_id else {})}


def put(
    saver: BaseCheckpointSaver[str],
    config: Any,
    values: dict[str, Any] | None = None,
    *,
    new: dict[str, str] | None = None,
    versions: dict[str, str] | None = None,
    **metadata: Any,
) -> Any:
    """Put a checkpoint whose new channels have the versions ``new``, by default all channels version 1."""
    values = values or {}
    changed: Any = dict.fromkeys(values, "1") if new is None else new
    checkpoint = empty_checkpoint()
    checkpoint["channel_values"] = values
    checkpoint["channel_versions"] = {**(versions or {}), **changed}
    known: Any = {"source": "loop", "step": 0, "parents": {}, **metadata}
    return saver.put(config, checkpoint, known, changed)


def put_chain(saver: BaseCheckpointSaver[str], thread_id: str, count: int, **metadata: Any) -> list[Any]:
    """Checkpoints after each other, each with a new list in the channel ``log``."""
    configs = [config_of(thread_id)]
    for step in range(count):
        values = {"log": list(range(step + 1))}
        configs.append(put(saver, configs[-1], values, new={"log": f"{step:04}"}, step=step, **metadata))
    return configs[1:]
