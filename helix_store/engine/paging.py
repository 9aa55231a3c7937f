"""Pages of rows in the order of an index."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, repeat
from typing import Any, Final

from django.db.models import QuerySet

from helix_store.engine.database import Database
from helix_store.engine.expressions import after_keyset

_CHARACTERS: Final = 4_000_000
_FIRST_AVERAGE: Final = 32_000
_LONG: Final = (str, bytes, memoryview)


def keyset_pages(
    db: Database, rows: QuerySet[Any], order: tuple[str, ...], *columns: str, sizes: Iterable[int]
) -> Iterator[list[tuple[Any, ...]]]:
    """Yield rows in pages, each read as one range of the index that begins with the columns of ``order``.

    ``order`` has no ties and no nullable column. A row is a tuple of its ``columns``, followed by those of
    ``order``. Each page has the next of ``sizes``. Rows may change between two pages.
    """
    order = tuple(rows.model._meta.pk.name if name == "pk" else name for name in order)
    ordered = rows.order_by(*order).values_list(*columns, *order)
    following = ordered
    for size in sizes:
        page: list[tuple[Any, ...]] = db.query(partial(list, following[:size]))
        if page:
            yield page
        if len(page) < size:
            return
        last = dict(zip(order, page[-1][len(columns) :], strict=True))
        following = ordered.filter(after_keyset(rows.model, last))


def distinct_values(db: Database, rows: QuerySet[Any], *names: str) -> Iterator[tuple[Any, ...]]:
    """Yield distinct values of columns in order, each by one lookup in the index that begins with them."""
    return chain.from_iterable(keyset_pages(db, rows, names, sizes=repeat(1)))


class Pace:
    """The size of the next page, based on the lengths of the rows read so far.

    A page of large rows then takes no more memory than a page of small rows.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._average: float = _FIRST_AVERAGE

    @property
    def rows(self) -> int:
        return max(1, min(self._most, int(_CHARACTERS / self._average)))

    def measure(self, rows: Iterable[tuple[Any, ...]]) -> None:
        lengths = [sum(len(value) for value in row if isinstance(value, _LONG)) for row in rows]
        if lengths:
            self._average = max(1.0, sum(lengths) / len(lengths))
