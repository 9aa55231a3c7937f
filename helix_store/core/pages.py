"""The base class of list pages."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TypeVar, overload

__all__ = ["Page"]

T = TypeVar("T")


class Page(Sequence[T]):
    """A page of a list, which is a sequence of its items."""

    __slots__ = ()

    @property
    @abstractmethod
    def _items(self) -> list[T]: ...

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        return self._items[index]
