"""Base classes of value objects: ``to_dict()`` and ``from_dict()`` from their annotations, and pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from datetime import datetime
from decimal import Decimal, InvalidOperation
from enum import Enum
from functools import cache, partial
from types import NoneType, UnionType
from typing import Any, Self, TypeVar, Union, get_args, get_origin, get_type_hints, overload

from helix_store.core.payload_faults import join_path
from helix_store.exceptions import InvalidPayload

T = TypeVar("T")

_Reader = Callable[[str, Any], Any]
"""Converts a plain value. The first argument is the path that errors report."""


def exact_cost(cost: Decimal) -> str:
    """Return a cost as plain digits, without an exponent and without trailing zeros."""
    digits = f"{cost:f}"
    return digits.rstrip("0").rstrip(".") if "." in digits else digits


class Serializable:
    """A dataclass that converts to and from a dict of plain JSON values by field name."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Build it from the result of `to_dict`. Raises `InvalidPayload` for unknown and missing keys."""
        if not isinstance(data, Mapping):
            raise InvalidPayload(
                path="", reason=f"expected a dict of {cls.__name__}, got {type(data).__name__}"
            )
        readers = _readers(cls)  # type: ignore[arg-type]  # a class is hashable
        for name in data:
            if name not in readers:
                raise InvalidPayload(path=join_path("", name), reason=f"{cls.__name__} has no such field")
        missing = [
            field.name
            for field in fields(cls)  # type: ignore[arg-type]
            if field.name not in data and field.default is MISSING and field.default_factory is MISSING
        ]
        if missing:
            raise InvalidPayload(path=f"/{missing[0]}", reason=f"{cls.__name__} needs this field")
        values: dict[str, Any] = {
            name: value if (reader := readers[name]) is None else reader(join_path("", name), value)
            for name, value in data.items()
        }
        return cls(**values)


@cache
def _readers(cls: type) -> dict[str, _Reader | None]:
    """Return a function that converts the values of each field, or ``None`` for plain values."""
    hints = get_type_hints(cls)
    return {field.name: _reader(hints[field.name]) for field in fields(cls)}


def _reader(hint: Any) -> _Reader | None:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        options = [option for option in get_args(hint) if option is not NoneType]
        return _reader(options[0]) if len(options) == 1 else None
    if origin in (list, dict):
        reader = _reader(get_args(hint)[-1])
        return None if reader is None else partial(_read_items, reader)
    if isinstance(hint, type) and issubclass(hint, datetime | Decimal | Enum | Serializable):
        return partial(_read_value, hint)
    return None


def _read_items(reader: _Reader, path: str, value: Any) -> Any:
    if isinstance(value, list):
        return [reader(join_path(path, index), item) for index, item in enumerate(value)]
    if isinstance(value, dict):
        return {key: reader(join_path(path, key), item) for key, item in value.items()}
    return value


def _read_value(cls: type, path: str, value: Any) -> Any:
    if value is None or isinstance(value, cls):
        return value
    try:
        return _rebuilt(cls, value)
    except InvalidPayload as exc:
        raise InvalidPayload(path=path + exc.path, reason=exc.reason) from exc
    except (TypeError, ValueError, InvalidOperation) as exc:
        raise InvalidPayload(path=path, reason=f"not a {cls.__name__}") from exc


def _rebuilt(cls: type, value: Any) -> Any:
    if issubclass(cls, Serializable):
        return cls.from_dict(value)
    if issubclass(cls, datetime):
        return cls.fromisoformat(value)
    if issubclass(cls, Decimal):
        # A float is not converted, because the check of the value will refuse it.
        return cls(value) if isinstance(value, str) else value
    return cls(value)  # type: ignore[call-arg]  # an enum looks its member up


def _plain(value: Any) -> Any:
    if isinstance(value, Serializable):
        return value.to_dict()
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Decimal):
        return exact_cost(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


class Page(Sequence[T]):
    """A page of a list, which is a sequence of its items. The first field of the dataclass holds them."""

    __slots__ = ()

    @property
    def _items(self) -> list[T]:
        items: list[T] = getattr(self, fields(self)[0].name)  # type: ignore[arg-type]
        return items

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
