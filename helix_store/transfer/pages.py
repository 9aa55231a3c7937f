"""Page sizes: a page of large rows takes no more memory than a page of small rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final

_CHARACTERS: Final = 4_000_000
_FIRST_AVERAGE: Final = 32_000
_LONG: Final = (str, bytes, memoryview)


class Pace:
    """The size of the next page, based on the length of the rows read before."""

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

    def rows_of(
        self, cursor: Any, reading: Callable[[], AbstractContextManager[None]]
    ) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a cursor in pages, each fetched in a ``reading`` block."""
        is_all = False
        while not is_all:
            size = self.rows
            with reading():
                page = cursor.fetchmany(size)
            self.measure(page)
            yield from page
            is_all = len(page) < size
