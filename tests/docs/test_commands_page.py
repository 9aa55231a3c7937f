"""The page of the commands names every command, and each section the options of its command."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Final

from django.core.management import CommandError, get_commands, load_command_class

from tests.cells import for_each
from tests.commands.test_help_examples import PARSERS, commands
from tests.docs.test_examples import PAGES, ROOT

TEXT: Final = (ROOT / "docs" / "commands.md").read_text()

SECTIONS: Final = {
    heading: body
    for heading, body in re.findall(r"^##+ (\w+(?: [\w-]+)?)$(.*?)(?=^##|\Z)", TEXT, re.MULTILINE | re.DOTALL)
    if heading in PARSERS
}

SHARED: Final = {
    "--help",
    "--database",
    "--all-databases",
    "--format",
    "--tenant",
    "--wide",
    "--verbosity",
    "--no-color",
    "--force-color",
    "--traceback",
    "--skip-checks",
    "--settings",
    "--pythonpath",
    "--version",
    "--noinput",
}


def test_the_overview_names_every_command() -> None:
    overview = TEXT[: TEXT.index("## What all commands share")]
    assert set(re.findall(r"^\| \[`(\w+)`\]", overview, re.MULTILINE)) == set(commands()) - {"migrate"}


@for_each("title", SECTIONS)
def test_a_section_lists_the_options_of_its_command(title: str) -> None:
    options = {
        option
        for action in PARSERS[title]._actions
        for option in action.option_strings
        if option.startswith("--")
    }
    cells = re.findall(r"^\| (`--.*?) \|", SECTIONS[title], re.MULTILINE)
    listed = {option for cell in cells for option in re.findall(r"`(--[a-z-]+)", cell)}
    assert listed - SHARED == options - SHARED


def test_each_sub_command_has_a_section() -> None:
    named = {title.split()[0] for title in SECTIONS}
    assert {title for title in PARSERS if title.split()[0] in named} == set(SECTIONS)


@for_each("page", PAGES, ids=lambda page: page.name)
def test_a_command_that_a_page_shows_has_valid_options(page: Path) -> None:
    """Names in capitals, points and brackets stand for values."""
    text = page.read_text()
    shown = re.findall(rf"manage\.py ({_COMMAND} [^\n#>|;&]*)", "\n".join(_FENCE.findall(text)))
    shown += re.findall(rf"`(?:python )?(?:manage\.py )?({_COMMAND}\s[^`]*)`", _FENCE.sub("", text))
    for line in shown:
        if "--" in line and not re.search(r"…|\[|<|\.\.\.|\b[A-Z]+\b|\$|'", line):
            _parse(line)


_FENCE: Final = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
_COMMAND: Final = r"(?:helix_(?!store)|cleanup_)\w+"


def _parse(line: str) -> None:
    name, *arguments = shlex.split(line)
    parser = load_command_class(get_commands()[name], name).create_parser("manage.py", name)
    try:
        parser.parse_args(arguments)
    except (CommandError, SystemExit) as refused:
        raise AssertionError(f"{line}: {refused}") from refused
