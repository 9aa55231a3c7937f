"""Conversations that an adapter keeps as items of a session, each in a lane."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any, Final, NamedTuple

from django.db.models import Model

from helix_store.catalogue import ConversationPage, Outline
from helix_store.core.moments import as_utc
from helix_store.core.transcript import ConversationMessage, Part
from helix_store.engine.database import Database
from helix_store.engine.expressions import list_parameter
from helix_store.engine.statement import Statement, table
from helix_store.models import Item
from helix_store.reports.payloads import PREVIEW_SOURCE, payload_start, read_start, start_text

_MOST_COUNTED: Final = 1_000
_MOST_THREADS: Final = 50
_LAST_CHARACTER: Final = "\U0010ffff"
_SOURCE: Final = 12_000
"""The maximum number of characters of a message that a page reads; the page of its item shows all of it."""

_ITEM: Final = table(Item)


class Said(NamedTuple):
    """The content of an item. ``at`` replaces the time at which the item was stored."""

    role: str
    parts: list[Part]
    at: datetime | None = None
    step: int | None = None


@dataclass(frozen=True, slots=True)
class ItemConversation:
    """The conversation of an adapter that keeps its messages as items.

    ``says`` reads the payload of an item, in which long text may have been cut off. It must not raise an
    error; it returns ``None`` for an item that it cannot read. ``lane`` is the lane of the main conversation,
    and all other lanes of the session are its other threads; if it ends with ``/``, all lanes that begin with
    it are threads, and the first of them is the main one. ``of`` is a table with one row for each session of
    the adapter: pass it if other adapters may use a lane of the same name.
    """

    name: str
    says: Callable[[dict[str, Any]], Said | None]
    lane: str
    of: type[Model] | None = None

    @property
    def needs(self) -> tuple[type[Model], ...]:
        return (Item,) if self.of is None else (self.of, Item)

    def outlines(self, db: Database, keys: Collection[int]) -> Mapping[int, Outline]:
        first, last = self._main
        parameters = {"keys": list_parameter(db, list(keys)), "first": first, "last": last}
        return {
            key: Outline(
                count=min(number, _MOST_COUNTED),
                is_partial=number > _MOST_COUNTED,
                last=self._message(number, pk, as_utc(at), start_text(start), PREVIEW_SOURCE),
            )
            for key, number, pk, at, start in db.read(_outlines(self.of), parameters)
        }

    def page(
        self, db: Database, key: int, *, first: int | None, limit: int, thread: str | None = None
    ) -> ConversationPage | None:
        if self.of is not None and not self.of._base_manager.using(db.alias).filter(session=key).exists():
            return None
        items = Item.objects.using(db.alias).filter(session=key)
        lanes = items.filter(lane__range=self._main) if self._has_prefix else items
        threads = list(lanes.order_by("lane").values_list("lane", flat=True).distinct()[:_MOST_THREADS])
        main = next((lane for lane in threads if self._has_prefix or lane == self.lane), None)
        if main is None:
            return None
        shown = thread if thread is not None and thread in threads else main
        items = items.filter(lane=shown)
        total = items.count()
        start = max(1, total - limit + 1) if first is None else first
        # Read from the end, where most requested pages are.
        skipped = max(0, total - (start + limit - 1))
        taken = max(0, min(limit, total - start + 1))
        columns = ("pk", "created_at", payload_start(_SOURCE))
        rows = list(items.order_by("-pk").values_list(*columns)[skipped : skipped + taken])
        return ConversationPage(
            messages=tuple(
                self._message(number, pk, at, text, _SOURCE)
                for number, (pk, at, text) in enumerate(reversed(rows), start)
            ),
            total=total,
            thread=shown,
            threads=tuple(threads) if len(threads) > 1 else (),
        )

    @property
    def _has_prefix(self) -> bool:
        return self.lane.endswith("/")

    @property
    def _main(self) -> tuple[str, str]:
        """The range of names, in sort order, that the main lane can have."""
        return self.lane, f"{self.lane}{_LAST_CHARACTER}" if self._has_prefix else self.lane

    def _message(self, number: int, pk: int, at: datetime, start: str, limit: int) -> ConversationMessage:
        payload, is_cut = read_start(start, limit)
        said = None if payload is None else self.says(payload)
        return ConversationMessage(
            number=number,
            role="?" if said is None else said.role,
            parts=None if said is None else said.parts,
            at=at if said is None or said.at is None else said.at,
            step=None if said is None else said.step,
            is_cut=is_cut,
            row=(Item, pk),
        )


@cache
def _outlines(of: type[Model] | None) -> Statement:
    owned = "" if of is None else f"AND EXISTS (SELECT 1 FROM {table(of)} AS o WHERE o.session_id = k.value)"

    def form(keys: str, start: str) -> str:
        return f"""
            WITH lanes AS (
                SELECT k.value AS session_id, (
                    SELECT lane FROM {_ITEM}
                    WHERE session_id = k.value AND lane >= %(first)s AND lane <= %(last)s
                    ORDER BY session_id, lane LIMIT 1
                ) AS lane
                FROM {keys} WHERE true {owned}
            ),
            counted AS (
                SELECT session_id, (
                    SELECT count(*) FROM (
                        SELECT 1 FROM {_ITEM} AS i
                        WHERE i.session_id = lanes.session_id AND i.lane = lanes.lane
                        LIMIT {_MOST_COUNTED + 1}
                    ) AS first_items
                ) AS number, (
                    SELECT id FROM {_ITEM} AS i
                    WHERE i.session_id = lanes.session_id AND i.lane = lanes.lane ORDER BY id DESC LIMIT 1
                ) AS newest
                FROM lanes WHERE lane IS NOT NULL
            )
            SELECT counted.session_id, number, i.id, i.created_at, {start}
            FROM counted JOIN {_ITEM} AS i ON i.id = newest"""

    start = f"substr(i.payload, 1, {PREVIEW_SOURCE + 1})"
    return Statement(
        form("unnest(%(keys)s::bigint[]) AS k(value)", start),
        form("json_each(%(keys)s) AS k", f"CAST({start} AS BLOB)"),
    )
