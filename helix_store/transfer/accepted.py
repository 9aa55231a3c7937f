"""Rules for the values that an import accepts in a column, which are also the rules of the stores' calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from django.db import models

from helix_store.core import validation
from helix_store.core.limits import MAX_LANE_BYTES, Limits
from helix_store.core.payloads import size_of
from helix_store.exceptions import LimitExceeded
from helix_store.models import Item, Message, Post, Session, StagedChange, StreamChunk
from helix_store.models.fields import IdentifierField, PayloadField

__all__ = ["Rule", "rule_of"]

Rule = Callable[[Any, str, Limits], object]
"""Raises `InvalidPayload` or `LimitExceeded` for the value of a column of this name. It is not ``None``."""

_TEXTS: Final[Mapping[str, Callable[[Any, str], object]]] = {
    "title": validation.title,
    "directory": validation.directory,
    "failure_reason": validation.reason,
    "reason": validation.reason,
    "completion_reason": validation.reason,
    "checkpoint_id": validation.checkpoint_id,
    "parent_checkpoint_id": validation.checkpoint_id,
    "tags": validation.tags,
    "metadata": validation.metadata,
}
_LIMITS: Final[Mapping[type[models.Model], str]] = {
    Message: "max_message_bytes",
    Post: "max_message_bytes",
    StagedChange: "max_staged_bytes",
    StreamChunk: "max_chunk_bytes",
}


def rule_of(field: models.Field[Any, Any]) -> Rule | None:
    """Return the rule of a column of this app, or ``None`` if every value of its type is accepted."""
    model = field.model
    if model._meta.app_label != Session._meta.app_label:
        return None
    if isinstance(field, PayloadField):
        return partial(_within_limit, _LIMITS.get(model, "max_state_bytes"))
    if isinstance(field, IdentifierField):
        # Retention clears the session id of usage when it removes the names.
        may_be_empty = bool(field.blank) or field.name == "recorded_for"
        return partial(_identified, model is Item, may_be_empty)
    check = _TEXTS.get(field.name)
    return None if check is None else lambda value, name, limits: check(value, name)


def _within_limit(limit_name: str, value: str, name: str, limits: Limits) -> None:
    limit = getattr(limits, limit_name)
    if len(value) > limit or size_of(value) > limit:
        raise LimitExceeded(name=limit_name, limit=limit, actual=size_of(value))


def _identified(is_of_item: bool, may_be_empty: bool, value: str, name: str, limits: Limits) -> None:
    if not value and may_be_empty:
        return
    if is_of_item:
        validation.text(value, name, limit=MAX_LANE_BYTES)
    else:
        validation.identifier(value, name)
