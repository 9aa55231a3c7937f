"""Two writes, of which the first is part of a caller's transaction that began before the second committed.

The transaction has an isolation level above READ COMMITTED, so its statements do not see the second write.
The outcome is sound if the first write fails and changes nothing, or if answers and rows are those of the two
writes made one after the other, in either order.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Final, NamedTuple

from django.db import DatabaseError, connections, transaction
from django.db.models import Max, Model

from helix_store.core import moments
from helix_store.exceptions import HelixStoreError
from helix_store.items import ItemLog
from helix_store.stores import DatabaseBudgetStore
from helix_store.testing.state_store.samples import message
from helix_store.testing.usage.base import tokens
from tests.databases import fresh_tenant
from tests.faults.stored_rows import MODELS, compared_fields, masked
from tests.faults.writes import KEY, STORIES, Faces
from tests.faults.writes.faces import Write

__all__ = ["LEVELS", "PAIRS", "Pair", "Races"]

LEVELS: Final = ("REPEATABLE READ", "SERIALIZABLE")

_DAY: Final = timedelta(days=1)
_APPROVE: Final = {"tool_name": "pay", "input": {"amount": 1}, "approval_id": "approval"}


# --- Writes that the stories lack ------------------------------------------------------------------


def _budgets(faces: Faces) -> DatabaseBudgetStore:
    return DatabaseBudgetStore(faces.alias, tenant=faces.tenant)


def _step_with_an_estimate(faces: Faces, key: str) -> None:
    """A turn with an estimate cannot begin in a block, as it does where the outcome of an order is found."""
    faces.locks.force_release(key)
    with (
        faces.store.session(key).turn(owner="worker") as turn,
        turn.step(estimate_tokens=5) as step,
    ):
        step.say(message("estimated"))


def _approve(faces: Faces, key: str, tool_call_id: str) -> object:
    return faces.store.submit_tool_result(key, tool_call_id, approved=True, approval_id="approval")


def _use_approval(faces: Faces, key: str) -> None:
    with faces.store.session(key).step() as step:
        step.use_approval("approved")


def _fenced_append(faces: Faces, key: str) -> object:
    """With the token of the worker that held the session's lock in the beginning."""
    return faces.store.append_messages(key, [message("fenced")], fencing_token=1)


_OTHER_WRITES: Final[dict[str, Write]] = {
    "create a child": lambda faces, key: faces.store.create_session(
        f"{key}-child", agent_type="agent", parent_session_id=key
    ),
    "delete the whole session": lambda faces, key: faces.store.delete_session(key),
    "delete the session, keep usage": lambda faces, key: faces.store.delete_session(key, keep_usage=True),
    "post for tomorrow": lambda faces, key: faces.store.post_message(
        key, message("later"), not_before=moments.now() + _DAY
    ),
    "post with a key": lambda faces, key: faces.store.post_message(key, message("once"), key="once"),
    "stage for the next step": lambda faces, key: faces.store.stage_changes(
        key, "step-3", {"tool_call_id": "call-2", "merge_changes": {"late": True}}
    ),
    "answer a call": lambda faces, key: faces.store.submit_tool_result(key, "asked", result=1),
    "approve a call": lambda faces, key: _approve(faces, key, "asked"),
    "use an approval": _use_approval,
    "step with an estimate": _step_with_an_estimate,
    "fenced append": _fenced_append,
    "acquire the session's lock": lambda faces, key: faces.locks.take_over(key, owner="other"),
    "release the session's lock by force": lambda faces, key: faces.locks.force_release(key),
    "name the user": lambda faces, key: ItemLog(
        f"{key}-nobody", using=faces.alias, tenant=faces.tenant, user_id="ada"
    ).append(["item"]),
    "usage of a session without a user": lambda faces, key: faces.usage.record_entry(
        tokens(f"{key}-nobody", id="of nobody", prompt=7, total=7)
    ),
    # Their ids elsewhere depend on the entries that the transaction sees.
    "usage: record_entry": lambda faces, key: faces.usage.record_entry(tokens(key, id="one", prompt=1)),
    "usage: record_entries": lambda faces, key: faces.usage.record_entries(
        [tokens(key, id=entry_id, prompt=1) for entry_id in ("one", "two")]
    ),
    "usage with an amount": lambda faces, key: faces.usage.record_entry(
        tokens(key, id="amount", prompt=3, total=5)
    ),
    "usage without an amount": lambda faces, key: faces.usage.record_entry(
        tokens(key, id="nothing", prompt=0)
    ),
    "budgets: create": lambda faces, key: _budgets(faces).set_budget(
        "new", scope="tenant", limit_tokens=1_000
    ),
    "budgets: change a limit": lambda faces, key: _budgets(faces).set_budget(
        "known", scope="tenant", limit_tokens=2_000
    ),
    "budgets: change a scope": lambda faces, key: _budgets(faces).set_budget(
        "known", scope="tree", value=key, limit_tokens=2_000
    ),
    "budgets: delete": lambda faces, key: _budgets(faces).delete_budget("known"),
}


def _begin_others(faces: Faces, key: str) -> None:
    lock = faces.locks.acquire(key, owner="first")
    assert lock is not None
    faces.store.create_session(f"{key}-nobody", agent_type="agent")
    faces.store.add_pending_tool_calls(key, {"asked": _APPROVE, "approved": _APPROVE})
    _approve(faces, key, "approved")
    faces.store.post_message(key, message("for tomorrow"), not_before=moments.now() + _DAY)
    _budgets(faces).set_budget("known", scope="tenant", limit_tokens=1_000)
    faces.usage.record_entry(tokens(key, id="first", prompt=10, total=10))


# --- Pairs -------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """``first`` runs in the transaction of the caller, after ``second`` has committed."""

    story: str
    first: str
    second: str


@dataclass(frozen=True)
class _Story:
    begin: Callable[[Faces, str], object]
    kinds: Mapping[str, Write]


def _stories() -> dict[str, _Story]:
    stories = {name: _Story(story.begin, story.kinds) for name, story in STORIES.items()}
    sessions = stories["sessions"]

    def begin(faces: Faces, key: str) -> None:
        sessions.begin(faces, key)
        _begin_others(faces, key)

    stories["sessions"] = _Story(begin, {**sessions.kinds, **_OTHER_WRITES})
    first = ("usage with an amount", "usage without an amount", "budgets: create")
    stories["first budget"] = _Story(
        lambda faces, key: faces.store.create_session(key, agent_type="agent"),
        {name: _OTHER_WRITES[name] for name in first},
    )
    return stories


_STORIES: Final = _stories()

PAIRS: Final = tuple(
    Pair(name, first, second)
    for name, story in _STORIES.items()
    for first in story.kinds
    for second in story.kinds
)
"""Every write against every other of the same story."""


# --- Races -------------------------------------------------------------------------------------------


class _Outcome(NamedTuple):
    answers: Counter[str]
    """Each answer after the name of its write."""
    rows: Counter[str]


class _Answer(NamedTuple):
    text: str
    is_refusal: bool
    """True if the caller can make the same transaction again."""


@dataclass(frozen=True)
class Races:
    """Races on one PostgreSQL database. ``other`` is the alias of a second connection to it."""

    alias: str
    other: str
    level: str
    counts: Counter[str] = field(default_factory=Counter)
    """The numbers of outcomes by their names."""
    _templates: dict[str, Template] = field(default_factory=dict)
    _outcomes: dict[tuple[str, ...], _Outcome] = field(default_factory=dict)

    def fault_of(self, pair: Pair) -> str | None:
        """Race a pair, and return what is wrong with the outcome, or ``None``."""
        kinds, template = _STORIES[pair.story].kinds, self._template(pair.story)
        copy = template.copy()
        here, there = (Faces.of_database(alias, copy.tenant) for alias in (self.alias, self.other))
        with _snapshot(self.other, self.level) as committing:
            second = _answered(lambda: kinds[pair.second](here, KEY))
            seen = copy.rows()
            first = committing(lambda: kinds[pair.first](there, KEY))
        rows = copy.rows()
        copy.delete()
        orphans = sorted({row.split()[1] for row in rows if row.startswith("orphan ")})
        if orphans:
            return f"{pair}: rows without a session: {orphans}"
        if first.is_refusal:
            self.counts[first.text] += 1
            return None if rows == seen else f"{pair}: {first.text}, but rows changed"
        found = _Outcome(_told((pair.first, first), (pair.second, second)), rows)
        expected = found
        for order in ((pair.first, pair.second), (pair.second, pair.first)):
            expected = self._in_order(pair.story, *order)
            if found == expected:
                self.counts["as in order"] += 1
                return None
        return (
            f"{pair}: as in no order. In the last one: {sorted(expected.answers - found.answers)}, "
            f"{sorted(expected.rows - found.rows)}; now: {sorted(found.answers - expected.answers)}, "
            f"{sorted(found.rows - expected.rows)}"
        )

    def _template(self, story: str) -> Template:
        if story not in self._templates:
            tenant = fresh_tenant()
            _STORIES[story].begin(Faces.of_database(self.alias, tenant), KEY)
            self._templates[story] = Template(self.alias, tenant)
        return self._templates[story]

    def _in_order(self, story: str, *kinds: str) -> _Outcome:
        """Return the outcome of writes one after the other, each in a block of its own."""
        if (story, *kinds) not in self._outcomes:
            template = Copy(self.alias, self._template(story).tenant)
            faces = Faces.of_database(self.alias, template.tenant)
            with transaction.atomic(using=self.alias):
                answers = [
                    (kind, _answered(partial(_in_block, _STORIES[story].kinds[kind], faces)))
                    for kind in kinds
                ]
                self._outcomes[story, *kinds] = _Outcome(_told(*answers), template.rows())
                transaction.set_rollback(True, using=self.alias)
        return self._outcomes[story, *kinds]


def _told(*answers: tuple[str, _Answer]) -> Counter[str]:
    return Counter(f"{kind}: {answer.text}" for kind, answer in answers)


def _in_block(write: Write, faces: Faces) -> object:
    with transaction.atomic(using=faces.alias):
        return write(faces, KEY)


# --- Rows ---------------------------------------------------------------------------------------------

_STEP: Final = 10_000_000


class Template:
    """What a story begins with: the rows of a tenant, which are copied for each race."""

    def __init__(self, alias: str, tenant: str) -> None:
        self.alias, self.tenant = alias, tenant
        found = {model: _keys_of(model, alias, tenant) for model in MODELS}
        self._keys = {model: keys for model, keys in found.items() if keys}
        newest = (model._base_manager.using(alias).aggregate(newest=Max("pk"))["newest"] for model in MODELS)
        self._steps = itertools.count(max(each or 0 for each in newest) // _STEP + 1)

    def copy(self) -> Copy:
        """Copy the rows to a new tenant, with keys that are the same distance away."""
        copy = Copy(self.alias, fresh_tenant(), next(self._steps) * _STEP)
        texts = (_copy_of(model, keys, copy) for model, keys in self._keys.items())
        _run(self.alias, "; ".join(texts))
        return copy


@dataclass(frozen=True)
class Copy:
    """A tenant. The rows that were copied to it have keys from ``first`` to ``first`` + `_STEP`."""

    alias: str
    tenant: str
    first: int = 0

    def rows(self) -> Counter[str]:
        """Every row of the tenant, and every row that belongs to a session or stream that is gone."""
        texts = (
            f"SELECT '{model._meta.label}', to_jsonb(c), {_is_orphan(model)} "
            f'FROM "{model._meta.db_table}" AS c WHERE {self._is_own(model)}'
            for model in MODELS
        )
        random_ids = {model._meta.label: _random_columns(model) for model in MODELS}
        rows: Counter[str] = Counter()
        for label, found, is_orphan in _run(self.alias, " UNION ALL ".join(texts)):
            row = json.loads(found) if isinstance(found, str) else found
            shown = {name: value for name, value in row.items() if name not in random_ids[label]}
            rows[f"{'orphan ' if is_orphan else ''}{label} {_masked(repr(shown))}"] += 1
        return rows

    def delete(self) -> None:
        texts = (
            f'DELETE FROM "{model._meta.db_table}" AS c WHERE {self._is_own(model)}'
            for model in reversed(_PARENTS_FIRST)
        )
        _run(self.alias, "; ".join(texts))

    def _is_own(self, model: type[Model]) -> str:
        is_own = []
        if _has(model, "tenant"):
            is_own.append(f"c.tenant = '{self.tenant}'")
        for parent in _parents(model):
            column, table = parent.column, parent.related_model._meta.db_table
            if self.first:
                is_own.append(f"c.{column} >= {self.first} AND c.{column} < {self.first + _STEP}")
            is_own.append(f"c.{column} IN (SELECT id FROM \"{table}\" WHERE tenant = '{self.tenant}')")
        return f"({' OR '.join(is_own)})"


def _has(model: type[Model], name: str) -> bool:
    return any(each.name == name for each in model._meta.concrete_fields)


def _parents(model: type[Model]) -> list[Any]:
    """The keys of the session or the stream that a row belongs to."""
    return [
        each
        for each in model._meta.concrete_fields
        if each.is_relation and each.name in ("session", "stream")
    ]


_PARENTS_FIRST: Final = sorted(MODELS, key=lambda model: len(_parents(model)))


def _keys_of(model: type[Model], alias: str, tenant: str) -> list[int]:
    path = "tenant" if _has(model, "tenant") else f"{_parents(model)[0].name}__tenant"
    return list(model._base_manager.using(alias).filter(**{path: tenant}).values_list("pk", flat=True))


def _is_orphan(model: type[Model]) -> str:
    of_parents = (
        f"c.{parent.column} IS NOT NULL AND NOT EXISTS ("
        f'SELECT 1 FROM "{parent.related_model._meta.db_table}" AS p WHERE p.id = c.{parent.column})'
        for parent in _parents(model)
    )
    return " OR ".join(of_parents) or "false"


def _random_columns(model: type[Model]) -> set[str]:
    return {str(each.column) for each in model._meta.concrete_fields} - {
        each.column for each in compared_fields(model)
    }


def _copy_of(model: type[Model], keys: Collection[int], copy: Copy) -> str:
    table = f'"{model._meta.db_table}"'
    columns = [each for each in model._meta.concrete_fields if not each.generated]
    names = ", ".join(f'"{each.column}"' for each in columns)
    values = ", ".join(_copied(each, copy) for each in columns)
    chosen = ", ".join(map(str, keys))
    return f"INSERT INTO {table} ({names}) SELECT {values} FROM {table} WHERE id IN ({chosen})"


def _copied(column: Any, copy: Copy) -> str:
    if column.name == "tenant":
        return f"'{copy.tenant}'"
    is_key = column.primary_key or column.is_relation
    return f'"{column.column}" + {copy.first}' if is_key else f'"{column.column}"'


def _run(alias: str, text: str) -> list[tuple[Any, ...]]:
    with connections[alias].cursor() as cursor:
        cursor.execute(text.replace("%", "%%"), None)
        return cursor.fetchall() if cursor.description else []


_STAGED_BY: Final = re.compile(r"(?<='operation_id': ')[\w-]{12}(?=', 'checkpoint_id': 'staged')")
_POSITION: Final = re.compile(r"(?<=openai-agents\.)([\w-]+\.main\.)\d+")


def _masked(text: str) -> str:
    # The position of a turn, in the id of its usage, before it can be taken for a time: keys of copies are
    # large. The id of the call that staged a change.
    return _STAGED_BY.sub("C", masked(_POSITION.sub(r"\1K", text)))


# --- Snapshots ----------------------------------------------------------------------------------------


@contextmanager
def _snapshot(alias: str, level: str) -> Iterator[Callable[[Callable[[], object]], _Answer]]:
    """Take a snapshot in a transaction; the function runs a write in it and commits."""
    atomic = transaction.atomic(using=alias)
    atomic.__enter__()
    try:
        with connections[alias].cursor() as cursor:
            cursor.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
            cursor.execute("SELECT 1")

        def committing(write: Callable[[], object]) -> _Answer:
            nonlocal atomic

            def run() -> object:
                try:
                    answer = write()
                except BaseException as exc:
                    atomic.__exit__(type(exc), exc, exc.__traceback__)
                    raise
                atomic.__exit__(None, None, None)
                return answer

            return _answered(run)

        yield committing
    finally:
        if connections[alias].in_atomic_block:
            error = RuntimeError("not committed")
            atomic.__exit__(RuntimeError, error, None)


def _answered(run: Callable[[], object]) -> _Answer:
    try:
        return _Answer(_masked(repr(run())), False)
    except HelixStoreError as exc:
        is_refusal = exc.retryable or exc.code == "unsupported_isolation"
        return _Answer(type(exc).__name__, is_refusal)
    except DatabaseError as exc:
        # Django's own commit reports the conflict.
        code = getattr(exc.__cause__, "sqlstate", None)
        return _Answer(f"{type(exc).__name__} {code}", code == "40001")
