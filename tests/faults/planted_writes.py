"""Stores with one planted fault each, which the campaign of killed writers has to find."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from django.db import transaction

from helix_store.stores import DatabaseStateStore
from tests.faults.killed_writers import FacesOf
from tests.faults.writes import Faces

__all__ = ["PLANTED"]


class _TearsSteps(DatabaseStateStore):
    """Commits the messages of a step before the rest."""

    def save_state_and_promote_staging(
        self, session_id: Any, state: Any, append_messages: Any, step: Any, **options: Any
    ) -> Any:
        self.append_messages(session_id, append_messages)
        return super().save_state_and_promote_staging(session_id, state, [], step, **options)


class _ForgetsToCommit(DatabaseStateStore):
    """Acknowledges a step whose transaction is still open."""

    def save_state_and_promote_staging(self, *arguments: Any, **options: Any) -> Any:
        transaction.atomic(using=self.alias).__enter__()
        return super().save_state_and_promote_staging(*arguments, **options)


class _WritesTwice(DatabaseStateStore):
    def save_state_and_promote_staging(self, *arguments: Any, **options: Any) -> Any:
        super().save_state_and_promote_staging(*arguments, **options)
        return super().save_state_and_promote_staging(*arguments, **options)


def _faces_with(store_class: type[DatabaseStateStore], alias: str, tenant: str) -> Faces:
    return replace(Faces.of_database(alias, tenant), store=store_class(alias, tenant=tenant))


def tears_steps(alias: str, tenant: str) -> Faces:
    return _faces_with(_TearsSteps, alias, tenant)


def forgets_to_commit(alias: str, tenant: str) -> Faces:
    return _faces_with(_ForgetsToCommit, alias, tenant)


def writes_twice(alias: str, tenant: str) -> Faces:
    return _faces_with(_WritesTwice, alias, tenant)


PLANTED: Final[tuple[FacesOf, ...]] = (tears_steps, forgets_to_commit, writes_twice)
