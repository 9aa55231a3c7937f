"""A test over a table of values is one test, which tries all of them and reports each that fails."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from traceback import extract_tb
from typing import Any, Final

import pytest

__all__ = ["table"]

Cell = Mapping[str, Any]
"""The arguments of a test that come from its table, by name."""

_MAKERS: Final = ("make_store", "make_state_store", "make_manager", "make_lock_manager")


def table(
    names: str | tuple[str, ...], values: Iterable[Any], *, shared: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Pass values to a test in turn, as `pytest.mark.parametrize` does, but in one test.

    Several tables above a test are multiplied. Each cell has its own tenant and fixtures. ``shared`` makes
    the fixtures once: use it for tests that leave their storage as it was.
    """
    columns = (names,) if isinstance(names, str) else names
    rows = [dict(zip(columns, (value,) if len(columns) == 1 else value, strict=True)) for value in values]
    assert rows, "an empty table tests nothing"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        original = getattr(test, "_test_of_cells", test)
        inner, is_shared = getattr(test, "_cells", [{}]), shared or getattr(test, "_is_shared", False)
        cells: list[Cell] = [{**first, **second} for first, second in itertools.product(rows, inner)]
        own = [
            parameter
            for name, parameter in inspect.signature(original).parameters.items()
            if name not in cells[0] and name != "self"
        ]

        @wraps(original)
        def of_all(self: Any, request: pytest.FixtureRequest, **given: Any) -> None:
            def try_cell(number: int, cell: Cell) -> None:
                if is_shared:
                    original(self, **given, **cell)
                    return
                with ExitStack() as stack:
                    apart = _of_another_tenant(self, f"cell-{number}-")
                    made: dict[str, Any] = {}
                    fixtures = {
                        parameter.name: _fixture(apart, parameter.name, made, stack, request)
                        for parameter in own
                    }
                    original(apart, **fixtures, **cell)

            _try_all(cells, try_cell)

        parameters = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", "request")
        ]
        signature = inspect.Signature([*parameters, *(own if is_shared else ())])
        vars(of_all).update(
            __signature__=signature, _test_of_cells=original, _cells=cells, _is_shared=is_shared
        )
        return of_all

    return decorate


def _try_all(cells: list[Cell], try_cell: Callable[[int, Cell], None]) -> None:
    failures: list[tuple[Cell, BaseException]] = []
    for number, cell in enumerate(cells):
        try:
            try_cell(number, cell)
        except (Exception, pytest.fail.Exception) as failure:  # noqa: BLE001  all are reported
            failures.append((cell, failure))
        except pytest.skip.Exception:
            if not failures:
                raise
    if failures:
        lines = [f"{len(failures)} of {len(cells)} cells fail:"]
        lines += [f"- {_text(cell)}: {_reason(failure)}" for cell, failure in failures]
        raise AssertionError("\n".join(lines)) from failures[0][1]


def _text(cell: Cell) -> str:
    return ", ".join(f"{name}={value!r:.80}" for name, value in cell.items())


def _reason(failure: BaseException) -> str:
    place = extract_tb(failure.__traceback__)[-1]
    return f"{type(failure).__name__}: {failure} ({Path(place.filename).name}:{place.lineno})"


def _of_another_tenant(suite: Any, prefix: str) -> Any:
    """A copy of a test's object, whose stores and managers belong to other tenants."""

    def prefixed(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *, tenant="", **given: make(tenant=prefix + tenant, **given)

    apart = copy.copy(suite)
    for name in _MAKERS:
        # The lock manager of a suite of streams is of one tenant.
        if hasattr(suite, name) and "tenant" in inspect.signature(getattr(suite, name)).parameters:
            setattr(apart, name, prefixed(getattr(suite, name)))
    return apart


def _fixture(
    suite: Any, name: str, made: dict[str, Any], stack: ExitStack, request: pytest.FixtureRequest
) -> Any:
    """The value of a fixture. Those of the class are made again for each cell."""
    if name not in made:
        declared = getattr(type(suite), name, None)
        if declared is None:
            made[name] = request.getfixturevalue(name)
        else:
            make = inspect.unwrap(declared)
            others = list(inspect.signature(make).parameters)[1:]
            given = [_fixture(suite, other, made, stack, request) for other in others]
            if inspect.isgeneratorfunction(make):
                made[name] = stack.enter_context(contextmanager(make)(suite, *given))
            else:
                made[name] = make(suite, *given)
    return made[name]
