"""What a page says to install can be installed today: no package index has the project."""

from __future__ import annotations

import re
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

from tests.cells import for_each
from tests.docs.test_examples import BLOCK, PAGES

MOST_BYTES = 150_000_000

EVERY_PAGE = for_each("page", PAGES, ids=lambda page: page.name)


@EVERY_PAGE
def test_a_page_installs_from_a_folder_or_from_git(page: Path) -> None:
    named = re.findall(r"pip install (?:-\w+ )*([\"']?)(.+?)\1[`\n )]", page.read_text())
    ours = [what for _, what in named if re.match(r"helix[-_]store", what)]
    assert [what for what in ours if " @ git+" not in what] == []


@EVERY_PAGE
def test_a_page_with_examples_of_the_example_project_says_how_to_run_them(page: Path) -> None:
    text = page.read_text()
    if any("example_project" in block[1] for block in BLOCK.finditer(text)):
        assert re.search(r'pip install -e "\.\[demo,[a-z-]+\]"', text)
        assert "python manage.py shell" in text


def test_the_demo_installs_less_than_150_mb() -> None:
    assert _installed_bytes("helix-store[demo]", set()) < MOST_BYTES


def _installed_bytes(name: str, known: set[str]) -> int:
    """The size of a requirement's files and of everything that it requires."""
    requirement = Requirement(name)
    if requirement.name.lower() in known:
        return 0
    known.add(requirement.name.lower())
    package = distribution(requirement.name)
    size = sum(file.size or 0 for file in package.files or ())
    for required in map(Requirement, package.requires or ()):
        marker = required.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in requirement.extras or {""}):
            size += _installed_bytes(f"{required.name}[{','.join(required.extras)}]", known)
    return size
