"""Text on a terminal: nothing in it is obeyed, and it is as wide as it says."""

from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from helix_store.management.output import cut, cut_middle, encodable, padded, visible, width_of, wrapped
from tests.cells import for_each


def obeyed(text: str, *, keep: str = "") -> set[str]:
    """The characters of a text that a terminal does not just show."""
    return {
        char
        for char in text
        if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp") and char not in keep
    }


@for_each(
    ("stored", "shown"),
    [
        ("\x1b[2J\x1b[31mred", "\\x1b[2J\\x1b[31mred"),
        ("a\nb\r\tc\bd", "a\\nb\\r\\tc\\x08d"),
        ("\x9b31m", "\\x9b31m"),
        ("safe\u202etxt.exe", "safe\\u202etxt.exe"),
        ("\u2066a\u2069\u200f\ufeff", "\\u2066a\\u2069\\u200f\\ufeff"),
        ("line\u2028paragraph\u2029", "line\\u2028paragraph\\u2029"),
        ("half \ud800", "half \\ud800"),
        ("\x7f\x00", "\\x7f\\x00"),
        ("\U000e0041", "\\U000e0041"),
        ("日本\u3000語 é\u0301 🙂 עברית", "日本\u3000語 é\u0301 🙂 עברית"),
    ],
    ids=ascii,
)
def test_what_a_terminal_obeys_is_escaped(stored: str, shown: str) -> None:
    assert visible(stored) == shown


@given(st.text())
def test_no_text_has_anything_left_to_obey(text: str) -> None:
    assert obeyed(visible(text)) == set()
    assert obeyed("".join(wrapped(text, 20)), keep="\u200c\u200d") == set()
    assert obeyed(visible(text).encode("ascii", "backslashreplace").decode()) == set()


@for_each(
    ("text", "width"),
    [("abc", 3), ("日本語", 6), ("🙂", 2), ("𐍈", 1), ("e\u0301", 1), ("ﾊﾝ", 2), ("한국", 4), ("❤\ufe0f", 2)],
)
def test_a_width_counts_cells(text: str, width: int) -> None:
    assert width_of(text) == width


def test_a_cut_text_says_that_it_is_cut() -> None:
    assert cut("session-0001", 12) == "session-0001"
    assert cut("session-0001", 8) == "session…"
    assert cut_middle("session-0001", 8) == "sess…001"
    # A wide character that does not fit as a whole is left out.
    assert cut("日本語文", 6) == "日本…"
    assert cut_middle("日本語文", 6) == "日…文"


@given(st.text(), st.integers(1, 30))
def test_a_cut_text_fits(text: str, width: int) -> None:
    shown = visible(text)
    for shorter in (cut(shown, width), cut_middle(shown, width)):
        assert width_of(shorter) <= width
        assert shorter == shown or "…" in shorter


def test_padding_counts_cells() -> None:
    assert padded("日本", 6) == "日本  "
    assert padded("12", 4, right=True) == "  12"


def test_a_long_text_is_wrapped_at_spaces_and_keeps_its_lines() -> None:
    text = "The quick brown fox jumps.\n\n  indented\tcode\nlast"
    assert wrapped(text, 14, indent="| ") == [
        "| The quick",
        "| brown fox",
        "| jumps.",
        "|",
        "|   indented",
        "| code",
        "| last",
    ]


def test_words_without_spaces_are_broken() -> None:
    assert wrapped("日本語文章", 5) == ["日本", "語文", "章"]
    assert wrapped("a" * 12, 5) == ["aaaaa", "aaaaa", "aa"]
    assert wrapped("日", 1) == ["日"]


@given(st.text(), st.integers(2, 30))
def test_wrapped_lines_fit_and_lose_nothing(text: str, width: int) -> None:
    lines = wrapped(text, width)
    assert all(width_of(line) <= width for line in lines)
    shown = visible(text.replace("\r\n", "\n"), keep="\u200c\u200d\n\t")
    assert "".join("".join(lines).split()) == "".join(shown.split())


def test_a_stream_gets_what_it_can_encode() -> None:
    assert encodable("é…\ud800", "utf-8") == "é…\\ud800"
    assert encodable("é…", "latin-1") == "é\\u2026"
    assert encodable("é…", None) == "é…"
