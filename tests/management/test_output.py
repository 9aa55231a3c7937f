"""Tables, times and bars: as wide as the terminal, with nothing in them that it obeys."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest
from django.test import override_settings
from hypothesis import given
from hypothesis import strategies as st

from helix_store.management.output import (
    STATUS_STYLES,
    Column,
    Layout,
    ProgressBar,
    age,
    bar,
    cell,
    pairs,
    table,
    terminal_width,
    time_or_age,
    width_of,
)
from helix_store.reports.payloads import epoch_moment, moment
from tests.cells import for_each

NOON = datetime(2026, 11, 22, 12, 0, 30, tzinfo=UTC)
ON = Layout(80, has_colours=True)

COLUMNS = [
    Column(heading="session", cut="middle"),
    Column(heading="status", cut="never", style=STATUS_STYLES.get),
    Column(heading="title"),
    Column(heading="steps", cut="never", right=True),
    Column(heading="updated", cut="never"),
]
ROWS: list[list[Any]] = [
    ["019a-" + "7" * 60 + "-end", "active", "A short title", 3, NOON],
    ["trip-1", "failed", "日本語のとても長い題名" * 8, 12_000, None],
    ["\x1b[31m\u202e", "completed", "🙂\n\r" * 40, 0, NOON],
]


@pytest.mark.parametrize("width", [80, 100, 120, 180])
def test_every_line_fits_the_width(width: int) -> None:
    lines = table(COLUMNS, ROWS, Layout(width)).splitlines()
    assert len(lines) == 4
    assert max(map(width_of, lines)) <= width
    assert lines[0].split() == ["session", "status", "title", "steps", "updated"]
    assert "…" in lines[2]
    assert lines[1].split()[0].startswith("019a-7")
    assert "-end " in lines[1]
    assert "2026-11-22 12:00 UTC" in lines[1]
    assert "12000" in lines[2]
    assert "\x1b" not in "".join(lines)


def test_a_narrow_table_uses_the_room_that_there_is() -> None:
    assert {width_of(line) for line in table(COLUMNS, ROWS[:2], Layout(120)).splitlines()[1:2]} == {120}


def test_without_a_width_every_cell_is_whole() -> None:
    text = table(COLUMNS, ROWS)
    assert ROWS[0][0] in text
    assert ROWS[1][2] in text
    assert "…" not in text


def test_columns_stand_below_each_other_with_wide_characters() -> None:
    text = table([Column("name"), Column("count")], [["日本", 1], ["abcdef", 2]])
    assert text.splitlines() == ["name    count", "日本    1", "abcdef  2"]


def test_a_table_without_rows_has_its_headings() -> None:
    assert table([Column("name"), Column("count")], [], Layout(80)) == "name  count"


@given(st.lists(st.tuples(st.text(), st.text(), st.integers()), max_size=5), st.integers(40, 120))
def test_any_stored_text_fits_and_is_one_line(rows: list[tuple[str, str, int]], width: int) -> None:
    columns = [Column(heading="a", cut="middle"), Column(heading="b"), Column(heading="c", right=True)]
    text = table(columns, rows, Layout(width))
    assert len(text.split("\n")) == len(rows) + 1
    assert len(text.splitlines()) == len(rows) + 1
    assert max(map(width_of, text.split("\n"))) <= width


def test_a_colour_adds_nothing_to_the_width() -> None:
    plain, coloured = (table(COLUMNS, ROWS, layout) for layout in (Layout(80), ON))
    assert coloured != plain
    assert (
        coloured.replace("\x1b[1m", "")
        .replace("\x1b[0m", "")
        .replace("\x1b[36m", "")
        .replace("\x1b[31m", "")
        .replace("\x1b[32m", "")
        == plain
    )
    assert "\x1b[31mfailed\x1b[0m" in coloured


def test_colours_end_with_their_line() -> None:
    assert ON.coloured("a\n\nb", "bold", "red") == "\x1b[1;31ma\x1b[0m\n\n\x1b[1;31mb\x1b[0m"
    assert Layout().coloured("a", "red") == "a"


def test_pairs_wrap_below_themselves() -> None:
    text = pairs(
        [("id", "trip-1"), ("title", "one two three four five six seven"), ("user", None)], Layout(30)
    )
    assert text.splitlines() == [
        "id     trip-1",
        "title  one two three four five",
        "       six seven",
        "user   -",
    ]
    assert pairs([("title", "a" * 200)]) == "title  " + "a" * 200


@pytest.mark.parametrize(
    ("zone", "expected"),
    [
        ("UTC", "2026-11-22 12:00 UTC"),
        ("Asia/Tokyo", "2026-11-22 21:00 +09:00"),
        ("America/Sao_Paulo", "2026-11-22 09:00 -03:00"),
        ("Asia/Kolkata", "2026-11-22 17:30 +05:30"),
    ],
)
def test_a_time_is_the_projects_with_its_zone(zone: str, expected: str) -> None:
    with override_settings(TIME_ZONE=zone):
        assert moment(NOON) == expected
        assert cell(NOON) == expected


def test_times_of_other_kinds() -> None:
    with override_settings(TIME_ZONE="UTC", USE_TZ=False):
        assert moment(NOON, seconds=True) == "2026-11-22 12:00:30 UTC"
        assert moment(None) == "-"
        assert epoch_moment(1_700_000_000_000) == "2023-11-14 22:13 UTC"
        assert epoch_moment(None) == "-"
        assert epoch_moment(2**53) == str(2**53)


def test_cells_of_other_kinds() -> None:
    assert [cell(value) for value in (None, True, False, 0, "")] == ["-", "yes", "no", "0", ""]


def test_the_width_is_that_of_the_terminal_or_eighty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "132")
    assert terminal_width() == 132
    monkeypatch.setenv("COLUMNS", "3")
    assert terminal_width() == 40


def test_bars_are_as_long_as_their_values_are_large() -> None:
    drawn = [bar(value, maximum=100, width=21) for value in (100, 50, 0.001, 0)]
    assert drawn == ["█" * 21, "█" * 10 + "▌", "▏", ""]


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_a_value_that_cannot_be_drawn_has_no_bar(value: float) -> None:
    assert bar(value, maximum=1, width=10) == ""


@given(st.floats(max_value=1), st.integers(1, 120))
def test_a_bar_of_anything_fits(value: float, width: int) -> None:
    assert len(bar(value, maximum=1, width=width)) <= width


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def progress(*, is_terminal: bool, total: int | None, is_silent: bool = False) -> list[str]:
    """What a bar writes for one step each half second, for fifteen seconds."""
    clock = Clock()
    written: list[str] = []
    with ProgressBar(
        written.append,
        unit="sessions",
        total=total,
        is_terminal=is_terminal,
        is_silent=is_silent,
        clock=clock,
    ) as progress_bar:
        for _ in range(30):
            clock.seconds += 0.5
            progress_bar.update(progress_bar.done + 1)
    return written


def test_progress_in_a_log_is_a_line_at_times() -> None:
    assert progress(is_terminal=False, total=60) == [
        "3%  2 of 60 sessions  2/s\n",
        "37%  22 of 60 sessions  2/s\n",
        "50%  30 of 60 sessions  2/s\n",
    ]
    assert progress(is_terminal=False, total=None)[-1] == "30 sessions  2/s\n"


def test_progress_on_a_terminal_is_one_line_drawn_again() -> None:
    written = progress(is_terminal=True, total=30)
    assert len(written) == 30
    assert all(text.startswith("\r▕") for text in written)
    assert [text.endswith("\n") for text in written] == [False] * 29 + [True]
    assert "100%  30 of 30 sessions" in written[-1]


def test_progress_is_silent_when_it_is_short_or_told_to() -> None:
    assert progress(is_terminal=True, total=30, is_silent=True) == []
    written: list[str] = []
    with ProgressBar(written.append, unit="x", is_terminal=True, clock=Clock()) as short:
        short.update(100)
    assert written == []


DAY = timedelta(days=1)
DATE = datetime.fromisoformat("2026-11-20")
AGES: Final[dict[str | int | timedelta, timedelta | None]] = {
    "0": timedelta(),
    "30": 30 * DAY,
    "30d": 30 * DAY,
    "036525": 36_525 * DAY,
    "90s": timedelta(seconds=90),
    "30m": timedelta(minutes=30),
    "12h": DAY / 2,
    "2w": 14 * DAY,
    7: 7 * DAY,
    DAY: DAY,
    "36526": None,
    "9999999": None,
    "999999999w": None,
    10**30: None,
    -1: None,
    -DAY: None,
    "-1": None,
    "1.5": None,
    "1 d": None,
    "d": None,
    "": None,
    "\N{ARABIC-INDIC DIGIT ONE}": None,
}


@for_each("parse", [age, time_or_age])
@for_each("given", AGES)
def test_a_number_alone_is_an_age_in_days(parse: Callable[[Any], Any], given: str | int | timedelta) -> None:
    expected = AGES[given]
    if expected is not None:
        assert parse(given) == expected
        return
    with pytest.raises(argparse.ArgumentTypeError):
        parse(given)


@for_each("given", ["20261120", "2026-11-20", "2026-11-20T00:00", DATE])
def test_eight_digits_are_a_date_and_no_age(given: str | datetime) -> None:
    assert time_or_age(given) == DATE
    if isinstance(given, str):
        with pytest.raises(argparse.ArgumentTypeError):
            age(given)
