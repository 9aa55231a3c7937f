"""The table of incidents in docs/reliability.md lists the tests of this folder, and what they are about."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Final

from tests.museum import test_advisories, test_peers_coordination, test_peers_state

PAGE: Final = Path(__file__).parents[2] / "docs" / "reliability.md"
MODULES: Final[tuple[ModuleType, ...]] = (test_peers_state, test_peers_coordination, test_advisories)


def test_every_incident_of_the_table_has_its_test_and_every_test_its_row() -> None:
    _, _, text = PAGE.read_text().partition("\n## Incidents of other stores\n")
    section = text.partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| `(test_\w+)` \|$", section, re.MULTILINE)
    tests = [
        (inspect.getdoc(test), name)
        for module in MODULES
        for name, test in vars(module).items()
        if name.startswith("test_") and inspect.isfunction(test)
    ]
    assert rows == tests
