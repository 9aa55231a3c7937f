"""The style sheets under admin themes that do not define the variables of Django's admin."""

from __future__ import annotations

import re
from pathlib import Path

import helix_store

SHEETS = sorted((Path(helix_store.__file__).parent / "static/helix_store").glob("*.css"))


def test_a_variable_of_djangos_admin_has_a_value_for_themes_that_do_not_define_it() -> None:
    styles = {sheet.name: sheet.read_text() for sheet in SHEETS}
    assert {"admin.css", "lists.css", "session.css"} <= styles.keys()
    own = {name for text in styles.values() for name in re.findall(r"(--helix-[a-z-]+):", text)}
    without = {
        f"{sheet}: {name}"
        for sheet, text in styles.items()
        for name, rest in re.findall(r"var\(\s*(--[a-z-]+)\s*([,)])", text)
        if rest == ")" and name not in own
    }
    assert without == set()
