"""``to_dict()`` and ``from_dict()`` for the value objects, by their own annotations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from datetime import datetime
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Self, Union, get_args, get_origin, get_type_hints

from helix_store.core.payload_faults import join_path
from helix_store.exceptions import InvalidPayload

__all__ = ["Serializable"]


class Serializable:
    """A dataclass that reads and writes plain JSON values under its own field names."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote. Unknown and missing keys raise `InvalidPayload`."""
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
        values: dict[str, Any] = {name: _read(readers[name], name, value) for name, value in data.items()}
        return cls(**values)


@cache
def _readers(cls: type) -> dict[str, type | None]:
    """Per field, the class its values are rebuilt as; ``None`` for values that are plain already."""
    hints = get_type_hints(cls)
    return {field.name: _rebuilt_class(hints[field.name]) for field in fields(cls)}


def _rebuilt_class(hint: Any) -> type | None:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        options = [option for option in get_args(hint) if option is not NoneType]
        return _rebuilt_class(options[0]) if len(options) == 1 else None
    if origin is list:
        return _rebuilt_class(get_args(hint)[0])
    if isinstance(hint, type) and issubclass(hint, datetime | Enum | Serializable):
        return hint
    return None


def _read(cls: type | None, name: str, value: Any) -> Any:
    if cls is None or value is None or isinstance(value, cls):
        return value
    if isinstance(value, list):
        return [_read(cls, name, item) for item in value]
    try:
        if issubclass(cls, Serializable):
            return cls.from_dict(value)
        if issubclass(cls, datetime):
            return cls.fromisoformat(value)
        return cls(value)  # type: ignore[call-arg]  # an enum looks its member up
    except (TypeError, ValueError) as exc:
        raise InvalidPayload(path=f"/{name}", reason=f"not a {cls.__name__}") from exc


def _plain(value: Any) -> Any:
    if isinstance(value, Serializable):
        return value.to_dict()
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value
