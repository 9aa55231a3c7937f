"""Stories: kinds of writes that follow each other, and how what they leave is read.

A mirror tells the same story undisturbed: what a database has after a kill is what the mirror has after as
many writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from django.apps import apps
from django.db.models import Model

from helix_store.exceptions import HelixStoreError
from tests.faults.writes.faces import Faces
from tests.faults.writes.frameworks import FRAMEWORKS, begin_frameworks
from tests.faults.writes.logs import CLAIMS, LOGS, begin_logs
from tests.faults.writes.managers import (
    MANAGERS,
    SEVERAL_TRANSACTIONS,
    begin_managers,
    contents_of_managers,
)
from tests.faults.writes.sessions import SESSIONS, begin_session, contents_of_session

__all__ = ["KEY", "STORIES", "Contents", "Story", "masked", "public_contents", "write"]

KEY: Final = "story"

Contents = Mapping[str, str]
"""What is stored, by its name, without times and random ids."""

_TIME: Final = re.compile(
    r"datetime\.datetime\((?:[^()]|\([^()]*\))*\)|\b\d{4}-\d\d-\d\dT[\d:.]{8,}(?:Z|\+00:00)"
)
_MILLISECONDS: Final = re.compile(r"\b[12]\d{12}\b")
_RANDOM: Final = re.compile(
    r"-t\d{13}-[0-9a-f]{6}|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|\b[0-9a-f]{32}\b"
    # The position of a turn, in the id of its usage.
    r"|(?<=\.main\.)\d+(?=\.)"
    # The call that staged a change, in the mark that it was promoted or discarded.
    r"|(?<=')[\w-]{12}(?='\|''\|'staged')"
)


@dataclass(frozen=True)
class Story:
    """Of ``several`` kinds a write is more than one transaction."""

    name: str
    kinds: Mapping[str, Callable[[Faces, str], object]]
    begin: Callable[[Faces, str], object]
    has_memory: bool
    tables: Sequence[type[Model]]
    several: frozenset[str] = frozenset()


def write(story: Story, faces: Faces, kind: str) -> None:
    """Make a write. A refusal is a result: the mirror refuses the same."""
    try:
        story.kinds[kind](faces, KEY)
    except HelixStoreError as exc:
        if exc.retryable or exc.applied == "unknown":
            raise


def _begin_sessions(faces: Faces, key: str) -> None:
    begin_session(faces, key)
    begin_managers(faces, key)


def public_contents(faces: Faces) -> Contents:
    """What the stores return, as text: ``1``, ``1.0`` and ``True`` differ."""
    seen: dict[str, Any] = {**contents_of_session(faces, KEY), **contents_of_managers(faces, KEY)}
    return {name: masked(repr(value)) for name, value in seen.items()}


def masked(text: str) -> str:
    """The text without times, and with the same number for each random id at every place."""
    numbers: dict[str, int] = {}

    def number(found: re.Match[str]) -> str:
        return f"#{numbers.setdefault(found[0], len(numbers))}"

    return _MILLISECONDS.sub("0", _RANDOM.sub(number, _TIME.sub("T", text)))


def _tables(*labels: str) -> list[type[Model]]:
    return [model for label in labels for model in apps.get_app_config(label).get_models()]


STORIES: Final = {
    story.name: story
    for story in (
        Story(
            "sessions",
            {**SESSIONS, **MANAGERS},
            _begin_sessions,
            has_memory=True,
            tables=_tables("helix_store"),
            several=frozenset(SEVERAL_TRANSACTIONS),
        ),
        Story(
            "logs",
            LOGS,
            begin_logs,
            has_memory=False,
            tables=_tables("helix_store", "helix_store_langgraph", "helix_store_openai_agents"),
            several=frozenset(CLAIMS),
        ),
        Story(
            "frameworks",
            FRAMEWORKS,
            begin_frameworks,
            has_memory=False,
            tables=_tables(
                *("helix_store", "helix_store_openai_agents"),
                *("helix_store_pydantic_ai", "helix_store_claude_agent"),
            ),
        ),
    )
}
