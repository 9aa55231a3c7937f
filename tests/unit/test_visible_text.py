"""One function decides which characters people cannot see."""

from __future__ import annotations

import json
import unicodedata
from itertools import combinations

import pytest

from helix_store.admin.elements import printable
from helix_store.core.transcript import KEPT_IN_PROSE, SPACES, is_invisible, visible, visible_json
from helix_store.management.output import visible as in_terminal

INVISIBLE = (
    *"\u200b\u200c\u200d\u2060\ufeff\u00ad\u061c\u180e\u115f\u1160\u3164\uffa0\u2800\u034f\ufe0f\ufe00",
    *"\u200e\u200f\u202a\u202e\u2066\u2069\u2028\u2029\u00a0\u3000\u2003\x00\x1b\x7f\x9b\ue000\ud800\uffff",
    *"\U000e0001\U000e0041\U000e007f\U000e0100\U000e01ef\U0010ffff\u17b4\u180b\u2065",
)
VISIBLE = " azAZ09äßж\u0627אあ漢한€→😀\u0301"


def test_each_kind_of_invisible_character_is_an_escape_everywhere() -> None:
    """Until now, pages had a list of characters, and the terminal another rule."""
    faults = []
    for char in INVISIBLE:
        text = f"pay{char}ment"
        ways = {
            "plain": visible(text),
            "JSON": visible_json(text),
            "a page": printable(text),
            "a terminal": "" if char in SPACES else in_terminal(text),
        }
        faults += [f"U+{ord(char):04X} {name}: {shown!r}" for name, shown in ways.items() if char in shown]
    assert faults == []


def test_what_people_can_see_is_not_an_escape() -> None:
    assert [char for char in VISIBLE if is_invisible(char)] == []
    assert visible("Grüße, 漢字 😀 C:\\temp\\new") == "Grüße, 漢字 😀 C:\\temp\\new"
    assert visible("\u0928\u200d\u3000❤\ufe0f", keep=KEPT_IN_PROSE) == "\u0928\u200d\u3000❤\ufe0f"


@pytest.mark.thorough
def test_no_category_of_invisible_characters_is_missing() -> None:
    invisible = {"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp", "Zs"}
    missed = [
        hex(code)
        for code in range(0x110000)
        if unicodedata.category(chr(code)) in invisible and code != 0x20 and not is_invisible(chr(code))
    ]
    assert missed == []


def _as_json(text: str) -> str:
    return visible_json(json.dumps(text, ensure_ascii=False))


def test_two_texts_that_differ_do_not_look_alike() -> None:
    texts = [
        "a\u200b",
        "a\\u200b",
        "a\\\\u200b",
        "a\\\u200b",
        "a\\\\\u200b",
        "a",
        "a\U000e0041",
        "a\udb40\udc41",
        "a\\U000e0041",
        "a\\x1b",
        "a\x1b",
        "\u00e9",
        "e\u0301",
        "K",
        "\u212a",
        "a\n",
        "a\\n",
        "a\\\n",
    ]
    for way in (visible, in_terminal, _as_json):
        shown = {text: unicodedata.normalize("NFC", way(text)) for text in texts}
        assert [pair for pair in combinations(texts, 2) if shown[pair[0]] == shown[pair[1]]] == []
