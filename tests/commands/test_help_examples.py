"""The examples in ``--help`` of every command run, on every database."""

from __future__ import annotations

import argparse
import io
import re
import shlex
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest
from django.core.management import CommandParser, call_command, get_commands, load_command_class
from psycopg.conninfo import make_conninfo

from helix_store import DatabaseStateStore
from tests.cells import for_each
from tests.commands.running import command_line, run
from tests.commands.sample import write_sample
from tests.databases import CommittedDatabase
from tests.transfer.sources.origins import ObskuTables, server_address

EXAMPLE: Final = re.compile(r"^ *example: (.+)$", re.MULTILINE)

EXPORTED: Final = "sessions.jsonl"
"""The file that an example of an import reads: an export of the sample."""

FROM_A_STORE: Final = "helix_import --from"

WITHOUT_EXAMPLE: Final = {"migrate"}
"""Django's own command with a lock around it."""

MAY_FIND_PROBLEMS: Final = {"helix_doctor"}
"""Exit code 1 says something of the machine that the tests run on."""


def commands() -> list[str]:
    """The commands of the app."""
    return sorted(name for name, app in get_commands().items() if app == "helix_store")


def parsers_of(name: str) -> Iterator[tuple[str, CommandParser]]:
    """The parsers that run something: of the command, or of each of its sub-commands."""
    parser = load_command_class("helix_store", name).create_parser("manage.py", name)
    parts = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not parts:
        yield name, parser
    for action in parts:
        for part, sub_parser in action.choices.items():
            yield f"{name} {part}", sub_parser


PARSERS: Final = {
    title: parser for name in commands() if name not in WITHOUT_EXAMPLE for title, parser in parsers_of(name)
}
EXAMPLES: Final = [line for parser in PARSERS.values() for line in EXAMPLE.findall(parser.epilog or "")]


@for_each("title", PARSERS)
def test_every_command_has_an_example_of_itself(title: str) -> None:
    examples = EXAMPLE.findall(PARSERS[title].epilog or "")
    assert examples, f"{title} needs an epilog: example: manage.py {title} …"
    for example in examples:
        assert shlex.split(example)[: 1 + len(title.split())] == ["manage.py", *title.split()]


@pytest.fixture
def sample(empty_db: CommittedDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CommittedDatabase:
    """The sample in the tenant "", in an empty folder."""
    write_sample(empty_db.alias)
    monkeypatch.chdir(tmp_path)
    return empty_db


@pytest.fixture
def other_store(request: pytest.FixtureRequest, sample: CommittedDatabase, tmp_path: Path) -> Iterator[Path]:
    """A service file of PostgreSQL for the database ``agents``, which another store has filled."""
    if FROM_A_STORE not in request.getfixturevalue("example"):
        yield tmp_path
        return
    schema = f"agents_{uuid.uuid4().hex}"
    service = {**server_address(), "options": f"-c search_path={schema}"}
    tables = ObskuTables(make_conninfo(**server_address()), schema)
    try:
        tables.session("scan-1")
        path = tmp_path / "pg_service.conf"
        path.write_text("[agents]\n" + "".join(f"{name}={value}\n" for name, value in service.items()))
        yield path
    finally:
        tables.drop()


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs(
    example: str, sample: CommittedDatabase, other_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, *readers = example.split(" | ")
    line, _, output_file = line.partition(" > ")
    name = shlex.split(line)[1]
    if FROM_A_STORE in line:
        monkeypatch.setenv("PGSERVICEFILE", str(other_store))
    elif name == "helix_import":
        _export(sample)
    elif name == "helix_move":
        DatabaseStateStore(sample.alias, tenant="acme").create_session("trip-1", agent_type="travel")
    elif "POST_ID" in line:
        post = DatabaseStateStore(sample.alias).post_message("trip-1", {"role": "user", "content": "Hello"})
        line = line.replace("POST_ID", post.post_id)
    elif " settle " in line:
        # Its worker dies in it.
        DatabaseStateStore(sample.alias).session("trip-1").effect("call-2").__enter__()
    ended = command_line(*shlex.split(line)[1:], "--database", sample.alias)
    assert ended.code in ((0, 1) if name in MAY_FIND_PROBLEMS else (0,)), ended.err
    assert ended.out or output_file or Path(EXPORTED).exists(), ended.err
    out = ended.out
    for reader in readers:
        out = _read(shlex.split(reader), out)


def _export(sample: CommittedDatabase) -> None:
    """An import never overwrites, so the sample that was exported goes."""
    call_command("helix_export", "--database", sample.alias, "--output", EXPORTED, stdout=io.StringIO())
    assert run(sample.alias, "helix_sessions", "delete", "trip-1", "--no-input").code == 0


def _read(program: list[str], text: str) -> str:
    with suppress(FileNotFoundError):
        read = subprocess.run(program, input=text, capture_output=True, text=True, timeout=30, check=True)
        return read.stdout
    read = subprocess.run(
        [sys.executable, "-m", "json.tool"],
        input=text,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return read.stdout
