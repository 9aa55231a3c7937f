"""A table of cells in one test: all of them run, and one error lists every cell that failed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from reprlib import repr as short
from types import TracebackType
from typing import Any, Self

import pytest
from _pytest.tmpdir import tmppath_result_key

__all__ = ["Cells", "for_each"]


class Cells:
    """Collects the failures of a table's cells, and raises one error when the table ends.

    >>> with Cells() as cells:
    ...     for name, value in {"one": 1, "two": 2}.items():
    ...         with cells.check(name):
    ...             assert value > 0
    """

    def __init__(self) -> None:
        self._passed = 0
        self._failed: list[tuple[object, BaseException]] = []
        self._skipped: list[str] = []

    @contextmanager
    def check(self, name: object) -> Iterator[None]:
        """Run the body as one cell: an error in it does not stop the others."""
        try:
            yield
        except pytest.skip.Exception as reason:
            self._skipped.append(f"{name}: {reason}")
        except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001  # any failure is one of the cell
            self._failed.append((name, error))
        else:
            self._passed += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._failed:
            cells = self._passed + len(self._failed)
            lines = [f"[{name}] {type(error).__name__}: {error}" for name, error in self._failed]
            raise AssertionError(
                "\n".join([f"{len(lines)} of {cells} cells failed:", *lines])
            ) from self._failed[0][1]
        if kind is None and not self._passed:
            if not self._skipped:
                raise AssertionError("A table without cells tests nothing.")
            pytest.skip("; ".join(self._skipped))


def for_each(
    names: str | Sequence[str], rows: Iterable[Any], *, ids: Any = None, shared: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run a test with each row of a table in turn: ``parametrize`` with one instance for all rows.

    Every row has fixtures of its own. With ``shared`` the rows share them, which is faster, and right for
    rows that leave nothing behind. The rows of an async test always share theirs.
    """
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    given = None if ids is None or callable(ids) else list(ids)
    table = [_cell(keys, row, ids if given is None else [given[number]]) for number, row in enumerate(rows)]

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(test)
        assert set(keys) <= signature.parameters.keys(), f"{test.__name__} takes not all of {keys}"
        kept = {name: each for name, each in signature.parameters.items() if name not in keys}

        if inspect.iscoroutinefunction(test):

            @wraps(test)
            async def run(*instance: Any, **fixtures: Any) -> None:
                with Cells() as cells:
                    for name, row in table:
                        with cells.check(name):
                            await test(*instance, **fixtures, **row)

        elif shared or not kept.keys() - {"self"}:

            @wraps(test)
            def run(*instance: Any, **fixtures: Any) -> None:
                with Cells() as cells:
                    for name, row in table:
                        with cells.check(name):
                            test(*instance, **fixtures, **row)

        else:
            needs_request = "request" in kept
            kept.setdefault("request", inspect.Parameter("request", inspect.Parameter.POSITIONAL_OR_KEYWORD))

            @wraps(test)
            def run(*instance: Any, request: pytest.FixtureRequest, **fixtures: Any) -> None:
                fixtures |= {"request": request} if needs_request else {}
                with Cells() as cells:
                    for number, (name, row) in enumerate(table):
                        with cells.check(name):
                            if number:
                                _make_anew(request)
                                # Others are of another table of the same test.
                                anew = fixtures.keys() & set(request.fixturenames)
                                fixtures |= {name: request.getfixturevalue(name) for name in anew}
                            test(*instance, **fixtures, **row)

        run.__signature__ = signature.replace(parameters=list(kept.values()))  # type: ignore[attr-defined]
        return run

    return decorate


def _make_anew(request: pytest.FixtureRequest) -> None:
    """Finish the fixtures of a test and make them again, as pytest does between two tests."""
    made: dict[str, Any] = request._fixture_defs
    request.node.stash.setdefault(tmppath_result_key, {})  # tmp_path asks for it when it is finished
    for name, fixture in reversed(list(made.items())):
        if fixture.scope == "function":
            fixture.finish(request)
            del made[name]
    for name in request.fixturenames:
        request.getfixturevalue(name)


@dataclass(frozen=True)
class _Name:
    """The name of a row, written only when the row fails: a value may be very large."""

    ids: Any
    values: tuple[Any, ...]

    def __str__(self) -> str:
        names = map(self.ids or _short, self.values) if callable(self.ids or _short) else self.ids
        return ", ".join(dict.fromkeys(str(name)[:80] for name in names))


def _short(value: Any) -> str:
    try:
        return str(getattr(value, "__name__", None) or short(value))
    except ValueError:  # an integer of very many digits
        return type(value).__name__


def _cell(keys: Sequence[str], row: Any, ids: Any) -> tuple[_Name, dict[str, Any]]:
    """The name of a row, and its values by argument."""
    if isinstance(row, type(pytest.param())):
        assert not row.marks, "A row of a table has no marks."
        ids = ids if row.id is None else [row.id]
        row = row.values if len(keys) > 1 else row.values[0]
    values = tuple(row) if len(keys) > 1 else (row,)
    return _Name(ids, values), dict(zip(keys, values, strict=True))
