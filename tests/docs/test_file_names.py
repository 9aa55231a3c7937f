"""A code block begins with the name of its file: plain Markdown drops other text of a fence."""

from __future__ import annotations

import re
from pathlib import Path

from tests.cells import for_each
from tests.docs.projects import File, blocks_of
from tests.docs.test_examples import PAGES


@for_each("page", PAGES, ids=lambda page: page.name)
def test_a_fence_names_a_language_and_nothing_else(page: Path) -> None:
    fences = re.findall(r"^ *```(.+)$", page.read_text(), re.MULTILINE)
    assert [fence for fence in fences if not fence.isalpha()] == []


def test_a_block_that_begins_with_the_name_of_a_file_is_that_file() -> None:
    named, plain = "```python\n# desk/agent.py\nA = 1\n```\n", "```python\n# A comment.\nA = 1\n```\n"
    (file,) = blocks_of(named + plain)
    assert file == File("desk/agent.py", "# desk/agent.py\nA = 1\n")


_WITHOUT_POLICIES = [page for page in PAGES if page.name != "row-level-security.md"]


@for_each("page", _WITHOUT_POLICIES, ids=lambda page: page.name)
def test_an_indented_block_of_python_is_a_file_because_no_test_runs_it(page: Path) -> None:
    """The page that is left out has a block that needs a policy of PostgreSQL."""
    assert re.findall(r"^ +```python\n(?! *# [\w/]+\.py\n) *(.*)$", page.read_text(), re.MULTILINE) == []
