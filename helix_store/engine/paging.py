"""Pages of rows in the order of an index."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from django.db.models import QuerySet

from helix_store.engine.database import Database
from helix_store.engine.expressions import after_keyset


def keyset_pages(
    db: Database, rows: QuerySet[Any], order: tuple[str, ...], *columns: str, sizes: Iterable[int]
) -> Iterator[list[tuple[Any, ...]]]:
    """Yield rows in pages, each read by one range of the index that begins with the columns of ``order``.

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
