"""Each path that CONTRIBUTING.md names exists, so that a reader finds what it describes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from tests.cells import for_each

ROOT: Final = Path(__file__).parent.parent.parent
TEXT: Final = (ROOT / "CONTRIBUTING.md").read_text()
PATHS: Final = sorted(set(re.findall(r"`([\w./-]+(?:/|\.py|\.md|\.toml))`", TEXT)))
_LINES_OF_A_SCREEN: Final = 50
_CHARACTERS_OF_A_LINE: Final = 180


@for_each("path", PATHS)
def test_a_path_exists_in_the_package_or_in_the_project(path: str) -> None:
    assert (ROOT / "helix_store" / path).exists() or (ROOT / path).exists()


def test_the_guide_names_the_files_of_the_subjects() -> None:
    assert {"sessions/steps.py", "core/types.py", "engine/errors.py", "budgets.py"} <= set(PATHS)


def test_where_to_add_what_fits_on_one_screen() -> None:
    (table,) = re.findall(r"^## Where to add what\n\n(.*?)\n\n", TEXT, re.DOTALL | re.MULTILINE)
    lines = [-(-len(row) // _CHARACTERS_OF_A_LINE) for row in table.splitlines()]
    assert sum(lines) <= _LINES_OF_A_SCREEN


def test_every_folder_and_file_of_the_package_is_in_the_map() -> None:
    named = {path.split("/")[0] for path in PATHS}
    package = ROOT / "helix_store"
    files = [path.relative_to(package).parts for path in package.rglob("*") if path.is_file()]
    # A folder that only has a cache is left of an earlier commit.
    found = {parts[0] for parts in files if "__pycache__" not in parts} - _NOT_IN_THE_MAP
    assert len(found) > 20
    assert found - named == set()


_NOT_IN_THE_MAP: Final = {"__init__.py", "py.typed"}
