"""A table of cells runs all of them, and fails when one of them does or none has run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cells import Cells, for_each


def test_every_cell_runs_and_every_failure_is_named() -> None:
    ran = []

    @for_each("number, limit", [(1, 2), (3, 2), (2, 3), pytest.param(5, 4, id="five")])
    def smaller(number: int, limit: int) -> None:
        ran.append(number)
        assert number < limit

    with pytest.raises(AssertionError, match=r"(?s)^2 of 4 cells failed:.*\[3, 2\].*\[five\]"):
        smaller()
    assert ran == [1, 3, 2, 5]


def test_a_table_without_cells_fails() -> None:
    with pytest.raises(AssertionError, match="without cells"), Cells():
        pass


def test_a_table_is_skipped_when_all_its_cells_are() -> None:
    with pytest.raises(pytest.skip.Exception, match="no server"), Cells() as cells, cells.check("one"):
        pytest.skip("no server")


@pytest.fixture
def made(outer: str, tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    finished[outer].append(tmp_path)


finished: dict[str, list[Path]] = {"one": [], "two": []}
"""The instances of a test may run in different processes, and in any order."""


@pytest.mark.parametrize("outer", ["one", "two"])
@for_each("row", range(3))
@for_each("column", range(2))
def test_a_cell_has_fixtures_of_its_own(made: Path, outer: str, row: int, column: int) -> None:
    assert made not in finished[outer]
    assert list(made.iterdir()) == []
    (made / "file").touch()
    assert len(finished[outer]) == 2 * row + column


@for_each("row", range(3), shared=True)
def test_cells_share_fixtures_when_they_say_so(tmp_path: Path, row: int) -> None:
    assert len(list(tmp_path.iterdir())) == row
    (tmp_path / str(row)).touch()
