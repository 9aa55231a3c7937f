"""Commands that Python calls: a keyword means what the option means on the command line."""

from __future__ import annotations

import argparse
import functools
import io
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pytest
from django.core.management import CommandError, call_command, load_command_class

from helix_store.actions.answers import json_argument
from helix_store.stores import DatabaseStateStore
from tests.cells import for_each
from tests.commands.test_help_examples import PARSERS
from tests.databases import CommittedDatabase

OPTIONS: Final = [
    (title, action)
    for title, parser in PARSERS.items()
    for action in parser._actions
    if action.dest not in ("help", "version", "settings", "pythonpath", "verbosity")
    and "--roots" not in action.option_strings  # another option for the value of --parent
]


def called(database: CommittedDatabase, *words: str, **options: Any) -> str:
    out = io.StringIO()
    given = {"database": database.alias, "verbosity": 0, **options}
    call_command(*words, stdout=out, stderr=io.StringIO(), **given)
    return out.getvalue()


@pytest.fixture
def session(committed_db: CommittedDatabase) -> CommittedDatabase:
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    store.create_session("trip-0", agent_type="agent", user_id="ada")
    store.create_session("trip-1", agent_type="agent", user_id="bob")
    return committed_db


def listed(database: CommittedDatabase, **options: Any) -> list[str]:
    data = json.loads(
        called(database, "helix_sessions", "list", tenant=database.tenant, format="json", **options)
    )
    return sorted(each["session_id"] for each in data["sessions"])


# --- Names -------------------------------------------------------------------------------------------


def test_no_positional_has_the_name_of_an_option_of_the_same_command() -> None:
    """Django takes a keyword for the required argument of this name, of whichever sub-command."""
    positionals, options = set[tuple[str, str]](), set[tuple[str, str]]()
    for title, parser in PARSERS.items():
        for action in parser._actions:
            named = options if action.option_strings else positionals
            named.add((title.split()[0], action.dest))
    assert positionals & options == set()


def test_the_status_of_a_list_may_be_a_keyword(session: CommittedDatabase) -> None:
    store = DatabaseStateStore(session.alias, tenant=session.tenant)
    called(session, "helix_sessions", "set-status", "trip-0", "completed", tenant=session.tenant)
    assert store.list_sessions(status="completed").sessions[0].session_id == "trip-0"
    for given in ("completed", ["completed"]):
        assert listed(session, status=given) == ["trip-0"]


def test_an_option_of_a_sub_command_has_the_name_of_its_flag_too(session: CommittedDatabase) -> None:
    assert listed(session, user_id="ada") == listed(session, user="ada") == ["trip-0"]


def test_an_option_of_another_sub_command_is_refused(session: CommittedDatabase) -> None:
    with pytest.raises(CommandError, match="The sub-command list has no option 'keep_usage'") as caught:
        listed(session, keep_usage=True)
    assert caught.value.returncode == 2


# --- Values ------------------------------------------------------------------------------------------


def texts_of(action: argparse.Action) -> Iterator[str]:
    """Values on a command line that some option of this type accepts."""
    if action.choices:
        yield str(next(iter(action.choices)))
    yield from ("7", "2026-01-01", "7d", "a=b", '{"a": 1}', "text")


def parsed_as(action: argparse.Action, text: str) -> Any:
    """What argparse makes of a value."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    several = action.nargs if isinstance(action.nargs, int) else 1
    settings: dict[str, Any] = {"type": action.type, "choices": action.choices, "nargs": action.nargs}
    if isinstance(action, argparse._AppendAction):
        settings["action"] = "extend" if action.nargs == "+" else "append"
    parser.add_argument("--x", **settings)
    return parser.parse_args(["--x", *[text] * several]).x


def converted(title: str, action: argparse.Action, value: Any) -> Any:
    """The value with which a command works that got this one as a keyword."""
    name, *part = title.split()
    command, parser = command_named(name)
    parser.parsed = {"part": part[0]} if part else {}
    return command._converted({**parser.parsed, action.dest: value})[action.dest]


@functools.cache
def command_named(name: str) -> tuple[Any, Any]:
    """A command and its parser, which take much longer to make than to ask."""
    command: Any = load_command_class("helix_store", name)
    return command, command.create_parser("", name)


VALUES: Final = [(title, action) for title, action in OPTIONS if action.nargs != 0 and action.option_strings]


@for_each(("title", "action"), VALUES, ids=lambda each: getattr(each, "dest", each))
def test_a_string_is_converted_as_argparse_does(title: str, action: argparse.Action) -> None:
    accepted = 0
    for text in texts_of(action):
        several = isinstance(action.nargs, int)
        given: Any = [text] * action.nargs if isinstance(action.nargs, int) else text
        try:
            expected = parsed_as(action, text)
        except argparse.ArgumentError:
            with pytest.raises(CommandError, match=action.option_strings[0]) as caught:
                converted(title, action, given)
            assert caught.value.returncode == 2
        else:
            accepted += 1
            assert converted(title, action, given) == expected
            assert several or converted(title, action, expected) == expected
    assert accepted


def test_every_option_that_takes_an_age_takes_days_without_a_unit() -> None:
    found = [(title, action) for title, action in VALUES if _is_of_ages(action)]
    assert [f"{title} {action.option_strings[0]}" for title, action in found] == [
        "cleanup_expired_sessions --delete-after",
        "helix_checkpoints prune --older-than",
        "helix_streams prune --older-than",
        "helix_usage --since",
        "helix_usage --until",
    ]
    for title, action in found:
        for given in ("7", 7, "7d", "1w", "168h"):
            assert converted(title, action, given) == timedelta(days=7)


def _is_of_ages(action: argparse.Action) -> bool:
    try:
        return callable(action.type) and isinstance(action.type("7d"), timedelta)
    except (argparse.ArgumentTypeError, ValueError):
        return False


@for_each(("title", "action"), OPTIONS, ids=lambda each: getattr(each, "dest", each))
def test_a_value_of_another_type_is_wrong_usage(title: str, action: argparse.Action) -> None:
    # A value of Python is JSON already.
    if not (action.type or action.nargs == 0 or action.choices) or action.type is json_argument:
        return
    for value in (object(), 1.5, ["no", object()], "no" if action.nargs == 0 else object()):
        with pytest.raises(CommandError, match="argument ") as caught:
            converted(title, action, value)
        assert caught.value.returncode == 2


CALLS: Final[list[tuple[str, dict[str, Any], str]]] = [
    ("cleanup_expired_sessions", {"batch_size": 0}, "--batch-size: expected a whole number from 1, got 0"),
    ("cleanup_expired_sessions", {"dry_run": "no"}, "--dry-run: expected True or False, got 'no'"),
    ("helix_retention", {"batch_size": 0}, "--batch-size: expected a whole number from 1, got 0"),
    ("helix_usage", {"since": "yesterday"}, "--since: expected"),
    ("helix_usage", {"limit": True}, "--limit: expected a whole number from 1, got True"),
    ("helix_usage", {"format": "xml"}, "--format: invalid choice: 'xml'"),
    ("helix_export", {"session": 7}, "--session: invalid value 7"),
    ("helix_import", {"source": "obsku"}, "--from: expected 2 values, got 'obsku'"),
    ("helix_sessions list", {"offset": -1}, "--offset: expected a whole number from 0, got -1"),
    ("helix_sessions list", {"created_from": 5}, "--created-from: invalid value 5"),
    ("helix_checkpoints prune", {"keep": 1, "older_than": "x"}, "--older-than: expected an age"),
    ("cleanup_expired_sessions", {"delete_after": "2026-01-01"}, "--delete-after: expected an age"),
]


@for_each(("command", "options", "problem"), CALLS)
def test_a_wrong_value_names_the_option(
    session: CommittedDatabase, command: str, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(CommandError) as caught:
        called(session, *command.split(), **options)
    assert f"argument {problem}" in str(caught.value)
    assert caught.value.returncode == 2


WORDS: Final = [
    *(f"{title} --no-such-option" for title in PARSERS),
    *(f"{title} --format xml" for title in PARSERS),
    *(f"{title} --verbosity many" for title in PARSERS),
    *sorted({title.split()[0] for title in PARSERS if " " in title}),
    *(f"{title.split()[0]} no-such-part" for title in PARSERS if title.endswith(" list")),
    "helix_checkpoints prune",
    "helix_checkpoints prune --keep -1",
    "helix_sessions list --parent a --roots",
    "helix_sessions show",
    "helix_usage --since yesterday",
]


@for_each("words", WORDS)
def test_wrong_usage_in_strings_has_the_code_of_the_command_line(words: str) -> None:
    with pytest.raises(CommandError) as caught:
        call_command(*words.split(), stdout=io.StringIO(), stderr=io.StringIO())
    assert caught.value.returncode == 2


@for_each(
    ("command", "options"),
    [
        ("helix_checkpoints prune", {"keep": 20, "older_than": 30}),
        ("helix_checkpoints prune", {"keep": "20", "older_than": timedelta(days=30)}),
        ("helix_usage", {"since": "2026-01-01"}),
        ("helix_usage", {"since": "7d", "until": datetime(2030, 1, 1, tzinfo=UTC)}),
        ("helix_streams prune", {"older_than": "7d", "keep_chunks": "0"}),
        ("cleanup_expired_sessions", {"delete_after": 3650, "dry_run": True}),
        ("helix_sessions list", {"metadata": {"a": "b"}, "tags": "x", "created_from": "2026-01-01"}),
    ],
)
def test_a_call_with_values_of_python_works(
    session: CommittedDatabase, command: str, options: dict[str, Any]
) -> None:
    if command != "cleanup_expired_sessions":
        options = {"tenant": session.tenant, **options}
    assert called(session, *command.split(), **options)


def test_a_string_is_one_session_of_an_export(session: CommittedDatabase, tmp_path: Path) -> None:
    file = tmp_path / "sessions.jsonl"
    called(session, "helix_export", session="trip-0", tenant=session.tenant, output=file)
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [each["session_id"] for each in records if each["record"] == "session"] == ["trip-0"]


def test_a_parsed_string_of_json_is_not_parsed_again(session: CommittedDatabase) -> None:
    store = DatabaseStateStore(session.alias, tenant=session.tenant)
    calls: list[tuple[list[str], dict[str, Any]]] = [
        (["--result", '"word"'], {}),
        ([], {"result": '"word"'}),
        ([], {"result": ["word"]}),
    ]
    for number, (arguments, options) in enumerate(calls):
        store.session("trip-0").effect(f"call-{number}").__enter__()
        settle = ("settle", "trip-0", f"call-{number}", "done")
        called(session, "helix_sessions", *settle, *arguments, tenant=session.tenant, **options)
    assert [each.result for each in store.list_effects("trip-0").items] == ["word", "word", ["word"]]
