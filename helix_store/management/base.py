"""The base classes of the commands, and their common arguments."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any, Final, NamedTuple, NoReturn, TypeVar, cast

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import (
    BaseCommand,
    CommandError,
    CommandParser,
    DjangoHelpFormatter,
    OutputWrapper,
)
from django.db import DatabaseError, IntegrityError, connections

from helix_store.actions.sessions import SessionAction
from helix_store.core.types import Checkpoint, SessionState
from helix_store.engine.database import Database, alias_of, app_aliases
from helix_store.engine.errors import is_unavailable
from helix_store.exceptions import (
    CheckpointNotFound,
    HelixStoreError,
    InvalidCursor,
    InvalidPayload,
    InvalidQuery,
    SessionNotFound,
    StoreUnavailable,
)
from helix_store.management.output import (
    Column,
    Layout,
    ProgressBar,
    Table,
    cell,
    encodable,
    has_width,
    pairs,
    table,
    terminal_width,
    visible,
    whole_number,
)
from helix_store.reports.session import Position, checkpoint_of_step, named_position
from helix_store.schema import require_app
from helix_store.sessions.waiting import calls_of
from helix_store.stores import DatabaseStateStore
from helix_store.stores.directory import SessionDirectory
from helix_store.transfer.moves import has_rows

T = TypeVar("T")

_USAGE: Final = 2
_OPTION: Final = re.compile(r"-h|-v[0-3]?|--(?:[a-z][a-z-]*(?:=.*)?)?", re.DOTALL)


class WrongUsage(CommandError):
    """Wrong usage of a command. It exits with 2; any other `CommandError` exits with 1."""

    def __init__(self, message: str) -> None:
        super().__init__(message, returncode=_USAGE)


class StoreParser(CommandParser):
    """A parser that takes ids with a leading dash as values: the ids of Claude sessions may begin with one.

    Only strings in the form of an option are options: ``-h``, ``-v`` and lower-case words after two dashes.
    An id in that form, such as ``--work``, must follow ``--``. ``parsed`` has the last parsed values.

    An error ends the process with 2. Within `call_command` it raises `WrongUsage`.
    """

    parsed: Mapping[str, Any] = {}

    def error(self, message: str) -> NoReturn:
        if self.called_from_command_line:
            super().error(message)
        raise WrongUsage(f"Error: {message}")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found = super().parse_args(args, namespace)
        self.parsed = dict(vars(found))
        return found

    def _parse_optional(self, arg_string: str) -> Any:
        if arg_string.startswith("-") and not _OPTION.fullmatch(arg_string):
            return None
        return super()._parse_optional(arg_string)

    def _get_option_tuples(self, option_string: str) -> Any:
        """Return what an abbreviation may mean. Several names of one value are no choice."""
        found = super()._get_option_tuples(option_string)
        return found[:1] if len({action.dest for action, *_ in found}) == 1 else found


class StoreCommand(BaseCommand):
    """A command that writes data to stdout and progress to stderr. ``-v 0`` turns progress off.

    With several databases, it runs on each in turn and continues after problems. The highest exit code wins.

    The exit codes are 0 for success, 1 for problems found and 2 for wrong usage. The first SIGINT or SIGTERM
    sets `stop`, which the command checks between batches, and ends a `one_statement` block. The second signal
    ends the command immediately.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stop = threading.Event()
        self.verbosity = 1
        self.is_json = False
        self._stops_at_once = False
        self._is_output_empty = True
        self._opening = ""
        self._is_wide = False
        self._forces_colour = False

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        parser = super().create_parser(prog_name, subcommand, **kwargs)
        # Django's method does not let a command choose the class.
        parser.__class__ = StoreParser
        self._parser = cast(StoreParser, parser)
        return parser

    def add_arguments(self, parser: CommandParser) -> None:
        add_output_arguments(parser)

    def add_tenant_argument(self, parser: CommandParser) -> None:
        parser.add_argument("--tenant", help="Only this tenant (default: every tenant).")

    def add_wide_argument(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--wide", action="store_true", help="Print whole cells, however wide the terminal is."
        )

    @property
    def layout(self) -> Layout:
        """The layout of tables: as wide as the terminal, or ``COLUMNS``, unless ``--wide`` is given. Colours
        are off if there is no terminal, and with ``--no-color``, ``NO_COLOR`` or ``DJANGO_COLORS``.
        """
        width = terminal_width() if has_width(self.stdout) and not self._is_wide else None
        is_allowed = self._forces_colour or (self.stdout.isatty() and not os.environ.get("NO_COLOR"))
        has_colours = is_allowed and self.style.SUCCESS("x") != "x"
        return Layout(width, has_colours, is_whole=self._is_wide)

    def takes_one_database(self, options: Mapping[str, Any]) -> bool:
        """Return whether the command reads or writes one file, and so cannot use several databases."""
        return False

    def rounds(self, options: Mapping[str, Any]) -> Iterator[None]:
        """Yield once for each round over the databases. By default there is one round."""
        yield

    def execute(self, *args: Any, **options: Any) -> str | None:
        options = self._converted(options)
        aliases = _chosen_databases(options)
        if len(aliases) > 1 and self.takes_one_database(options):
            raise WrongUsage("This command works on one database at a time.")
        self.verbosity = options["verbosity"]
        self.is_json = options["format"] == "json"
        self._is_wide = bool(options.get("wide"))
        self._forces_colour = bool(options.get("force_color"))
        self.stop.clear()
        self._opening = ""
        self._without_tenant: list[str] = []
        self._has_tenant = False
        for name in ("stdout", "stderr"):
            if given := options.pop(name, None):
                setattr(self, name, OutputWrapper(given))
        failures: dict[str, CommandError] = {}
        with self._stopping_on_signals():
            for _ in self.rounds(options):
                self._execute_on_each(aliases, failures, *args, **options)
        if len(aliases) == 1 and failures:
            raise failures[aliases[0]]
        if failures:
            told = "\n".join(f"database {alias}: {exc}" for alias, exc in failures.items())
            raise CommandError(told, returncode=max(exc.returncode for exc in failures.values()))
        if self._without_tenant and not self._has_tenant:
            self.progress(_nothing_stored(options["tenant"], self._without_tenant))
        return None

    def _converted(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options, with those that `call_command` got as keywords as argparse would parse them."""
        parsed, converted = self._parser.parsed, self.named_options(options)
        # Of several options for one value, such as --parent and --roots, the first takes the value.
        actions = {action.dest: action for action in reversed(self.chosen_actions(options))}
        for name in actions.keys() & converted.keys():
            if converted[name] is not parsed.get(name):
                converted[name] = _as_parsed(actions[name], converted[name])
        if "interactive" in converted:
            try:
                converted["interactive"] = _flag(converted["interactive"]) and not converted["no_input"]
            except ValueError as exc:
                raise WrongUsage(f"argument interactive: {exc}.") from exc
        return converted

    def named_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options by the names of their values."""
        return dict(options)

    def chosen_actions(self, options: Mapping[str, Any]) -> list[argparse.Action]:
        """Return the arguments that the command takes with these options."""
        return self._parser._actions

    def _execute_on_each(
        self, aliases: Sequence[str], failures: dict[str, CommandError], *args: Any, **options: Any
    ) -> None:
        """Run on each database. Several are named above the output, or as keys of the JSON."""
        has_several = len(aliases) > 1
        for alias in aliases:
            is_first = alias == aliases[0]
            if has_several and self.is_json:
                # It waits for the output, because wrong usage in the first database ends the command.
                self._opening = f"{'{' if is_first else ', '}{json.dumps(alias)}: "
            elif has_several:
                self.write_text(f"{'' if is_first else chr(10)}database {visible(alias)}")
            self._is_output_empty = True
            try:
                self._execute(*args, **{**options, "database": alias})
            except CommandError as exc:
                # This may be wrong usage for this database, but not for the databases that have already been
                # processed. Problems that a command reports do not end the rounds, but an error does.
                is_reported = has_several or exc.__cause__ is None
                if not is_reported or (is_first and exc.returncode == _USAGE):
                    raise
                failures[alias] = exc
            if has_several and self.is_json and self._is_output_empty:
                self.write_text("null", ending="")
            options["skip_checks"] = True
            if self.stop.is_set():
                break
        if has_several and self.is_json:
            self.write_text("}")

    def _execute(self, *args: Any, **options: Any) -> None:
        """Run on one database."""
        try:
            require_app(Database(options["database"], ""))
            super().execute(*args, **options)
        except BrokenPipeError:
            # The reader has closed the pipe, as `head` does.
            drop_unwritten_output()
            raise SystemExit(1) from None
        except OSError as exc:
            # A full disk, or a file that the arguments name.
            drop_unwritten_output()
            failed = "The output cannot be written"
            if exc.filename is not None:
                failed = f"{visible(str(exc.filename))} cannot be read or written"
            raise CommandError(f"{failed}: {visible(exc.strerror or str(exc))}.") from exc
        except (ImproperlyConfigured, InvalidCursor, InvalidPayload, InvalidQuery) as exc:
            raise WrongUsage(str(exc)) from exc
        except HelixStoreError as exc:
            raise CommandError(str(exc)) from exc
        except IntegrityError as exc:
            raise CommandError(f"The database refused a change: {exc}") from exc
        except DatabaseError as exc:
            if is_unavailable(Database(options["database"], "").connection, exc):
                raise CommandError(str(StoreUnavailable())) from exc
            raise CommandError(f"The database refused a statement: {exc}. Has it been migrated?") from exc

    def look_for_tenant(self, options: Mapping[str, Any]) -> None:
        """Look for rows of ``--tenant``. If no database has any, the command says so at its end.

        Without this, a misspelled tenant would look like one for which there is nothing to do. It is no
        problem, because a tenant may be new, or empty again.
        """
        if options["tenant"] is None:
            return
        if has_rows(Database(options["database"], options["tenant"])):
            self._has_tenant = True
        else:
            self._without_tenant.append(options["database"])

    def progress(self, text: str) -> None:
        if self.verbosity > 0:
            self._write_error(text, ending="\n")

    def _write_error(self, text: str, *, ending: str = "") -> None:
        self.stderr.write(text, style_func=str, ending=ending)
        self.stderr.flush()

    def progress_bar(self, unit: str, *, total: int | None = None) -> ProgressBar:
        """Return a progress bar on stderr, which is silent with ``-v 0``."""
        encoding = getattr(self.stderr, "encoding", None)
        return ProgressBar(
            lambda text: self._write_error(encodable(text, encoding)),
            unit=unit,
            total=total,
            is_terminal=self.stderr.isatty() and os.environ.get("TERM") != "dumb",
            is_silent=self.verbosity == 0,
        )

    def run_batches(self, batches: Iterable[T], empty: T, *, unit: str, done: Callable[[T], int]) -> T:
        """Run batches until a signal stops them. Return the last totals, or ``empty`` if no batch ran."""
        totals = empty
        with self.progress_bar(unit) as progress:
            for totals in batches:
                progress.update(done(totals))
                if self.stop.is_set():
                    break
        return totals

    def add_confirmation_argument(self, parser: CommandParser) -> None:
        parser.add_argument("--no-input", action="store_true", help="Do not ask for confirmation.")
        # The names that Django's own commands have, the second one for call_command.
        parser.add_argument("--noinput", action="store_true", dest="no_input", help=argparse.SUPPRESS)
        parser.set_defaults(interactive=True)
        self.stealth_options = (*self.stealth_options, "interactive")

    def confirm(self, question: str) -> None:
        """Ask on stderr, and continue if stdin answers "yes". Any other answer ends the command."""
        self._stops_at_once = True
        try:
            self._write_error(f"{question} Type 'yes' to continue: ")
            answer = sys.stdin.readline()
        except KeyboardInterrupt:
            answer = "no"
        finally:
            self._stops_at_once = False
        if not answer:
            raise WrongUsage("There is no answer on stdin; nothing was changed. Use --no-input.")
        if answer.strip() != "yes":
            raise CommandError("Nothing was changed.")

    @contextmanager
    def one_statement(self, alias: str, stopped: str) -> Iterator[None]:
        """Run one long statement in a ``with`` block. The first signal cancels it and reports ``stopped``."""
        self._stops_at_once = True
        try:
            with Database(alias, tenant="").interruptible():
                yield
        except (KeyboardInterrupt, DatabaseError, HelixStoreError):
            if not self.stop.is_set():
                raise
            raise CommandError(stopped) from None
        finally:
            self._stops_at_once = False

    def write_data(self, data: Mapping[str, Any]) -> None:
        """Write one object as a line of JSON, or as a table of names and values."""
        if self.is_json:
            self.write_text(json.dumps(data))
        else:
            values = ((name.replace("_", " "), value) for name, value in data.items())
            self.write_text(pairs(values, self.layout))

    def write_table(self, columns: Sequence[Column], rows: Iterable[Any]) -> None:
        self.write_text(table(columns, rows, self.layout))

    def write_list(
        self,
        name: str,
        pages: Iterable[Any],
        *,
        columns: Sequence[Column],
        to_dict: Callable[[Any], Mapping[str, Any]],
    ) -> None:
        """Write the items ``name`` of pages as a table or as one JSON object, until a signal stops it."""
        lines = Table(columns, self.layout).lines
        # The opening text waits for the first page, so that there is no output if the database does not
        # answer.
        separator = opening = f'{{"{name}": ['
        listed, rest = 0, dict[str, Any]()
        with self.progress_bar(name) as progress:
            for page in pages:
                items = getattr(page, name)
                if not rest and hasattr(page, "total"):
                    rest["total"] = page.total
                rest["next_cursor"] = page.next_cursor
                if self.is_json and items:
                    plain = ", ".join(json.dumps(to_dict(item)) for item in items)
                    self.write_text(f"{separator}{plain}", ending="")
                    separator = ", "
                elif not self.is_json:
                    self.write_text("\n".join(lines(items)))
                listed += len(items)
                progress.update(listed)
                if self.stop.is_set():
                    break
        if self.is_json:
            self.write_text(f"{opening if separator == opening else ''}], {json.dumps(rest)[1:]}")
        else:
            if rest.get("total") is not None:
                self.progress(f"{rest['total']:,} {name} match.")
            if rest.get("next_cursor") is not None:
                self.progress(f"More {name} follow: --cursor {rest['next_cursor']}")
        if self.stop.is_set():
            self.progress(f"Stopped after {listed:,} {name}; --cursor continues.")

    def write_text(self, text: str, *, ending: str | None = None) -> None:
        """Write lines to stdout, escaping the characters that its encoding cannot represent."""
        opening, self._opening = self._opening, ""
        self.stdout.write(encodable(opening + text, getattr(self.stdout, "encoding", None)), ending=ending)
        self.stdout.flush()
        self._is_output_empty = False

    @contextmanager
    def _stopping_on_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.getsignal(number) for number in signals}

        def stop(number: int, frame: FrameType | None) -> None:
            self.stop.set()
            if self._stops_at_once:
                raise KeyboardInterrupt
            for each in signals:
                signal.signal(each, before[each])

        for number in signals:
            signal.signal(number, stop)
        try:
            yield
        finally:
            for number in signals:
                signal.signal(number, before[number])


def drop_unwritten_output() -> None:
    """Discard what stdout cannot write, because the interpreter would fail to flush it at exit.

    A stdout that still works is left alone: it may be that of a larger process.
    """
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError, ValueError, AttributeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def add_output_arguments(parser: CommandParser) -> None:
    """Add the options that every command has."""
    parser.add_argument(
        "--database",
        action="append",
        metavar="ALIAS",
        help="Alias of the database (default: the one that the stores use); may be repeated.",
    )
    parser.add_argument(
        "--all-databases", action="store_true", help="Every database that the app is migrated to."
    )
    add_format_argument(parser)


def add_named_argument(parser: argparse._ActionsContainer, name: str, other: str, **settings: Any) -> None:
    """Add an option with another name, which the help does not list."""
    parser.add_argument(name, **settings)
    parser.add_argument(other, **{**settings, "help": argparse.SUPPRESS})


def add_format_argument(parser: CommandParser) -> None:
    parser.add_argument(
        "--format", choices=["table", "json"], default="table", help="Format of the data on stdout."
    )


def _chosen_databases(options: Mapping[str, Any]) -> list[str]:
    """Return the selected aliases without duplicates, by default the tenant's alias."""
    given = options["database"] or []
    if options.get("all_databases"):
        if given:
            raise WrongUsage("Choose --database or --all-databases.")
        return app_aliases()
    aliases = [given] if isinstance(given, str) else list(dict.fromkeys(given))
    aliases = aliases or [alias_of(options.get("tenant") or "")]
    for alias in aliases:
        if alias not in connections:
            raise WrongUsage(f"There is no database {alias!r} in DATABASES.")
    return aliases


def _nothing_stored(tenant: str, aliases: Sequence[str]) -> str:
    where = f"database {aliases[0]!r}"
    if len(aliases) > 1:
        where = f"databases {', '.join(map(repr, aliases))}"
    return f"Nothing is stored for the tenant {cell(tenant)!r} in the {where}."


def at_least(minimum: int) -> Callable[[str | int], int]:
    """Return an argparse type for a whole number that is at least the minimum."""

    def number_from_minimum(given: str | int) -> int:
        try:
            number = whole_number(given)
        except ValueError:
            number = minimum - 1
        if number < minimum:
            raise argparse.ArgumentTypeError(f"expected a whole number from {minimum}, got {given!r}")
        return number

    return number_from_minimum


def _as_parsed(action: argparse.Action, value: Any) -> Any:
    """Return a value for an argument as argparse would parse it. `WrongUsage` names the argument."""
    name = "/".join(action.option_strings) or action.metavar or action.dest
    try:
        if action.nargs == 0:
            return _flag(value)
        if value is None:
            return None
        if isinstance(action, argparse._AppendAction):
            several = value.items() if isinstance(value, Mapping) else value
            return [_one_as_parsed(action, each) for each in ([value] if isinstance(value, str) else several)]
        if isinstance(action.nargs, int) and (isinstance(value, str) or len(value) != action.nargs):
            raise ValueError(f"expected {action.nargs} values, got {value!r}")
        return _one_as_parsed(action, value)
    except (argparse.ArgumentTypeError, ValueError) as exc:
        raise WrongUsage(f"argument {name}: {exc}.") from exc
    except (AttributeError, TypeError) as exc:
        raise WrongUsage(f"argument {name}: invalid value {value!r}.") from exc


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"expected True or False, got {value!r}")
    return value


def _one_as_parsed(action: argparse.Action, value: Any) -> Any:
    if callable(action.type):
        value = action.type(value)
    if action.choices is not None and value not in action.choices:
        raise ValueError(f"invalid choice: {value!r} (choose from {', '.join(map(str, action.choices))})")
    return value


def add_limit_argument(parser: CommandParser, what: str, *, default: int) -> None:
    help = f"At most this many {what} (default: %(default)s)."
    parser.add_argument("--limit", type=at_least(1), default=default, help=help)


def refuse_options(options: Mapping[str, Any], names: Iterable[str], reason: str) -> None:
    """Raise a usage error if one of the options is given."""
    for name in names:
        if options[name]:
            raise WrongUsage(f"{reason} --{name.replace('_', '-')}.")


_TENANTS_NAMED = 5
_SHORTEST_START = 4
"""The minimum number of characters that may select a session, as in git."""
_MATCHES_NAMED = 8
CHECKPOINT_FORMS: Final = (
    "A checkpoint id; or SESSION@latest, the newest one, SESSION@latest~2, the second before it, "
    "SESSION@step-57, that of step 57; SESSION alone means SESSION@latest."
)

_LARGEST_PAGE: Final = 200


def directory_of(options: Mapping[str, Any]) -> SessionDirectory:
    """Return the directory of sessions that ``--database`` and ``--tenant`` select."""
    return SessionDirectory(options["database"], tenant=options["tenant"])


def chosen_session(
    text: str, options: Mapping[str, Any], *, is_whole: bool = False
) -> tuple[DatabaseStateStore, str]:
    """Return the store and the id of the session that ``text`` selects by its id or by the start of its id.

    The start of an id needs at least four characters and must match one session, not counting that session's
    sub-sessions. ``is_whole`` requires a whole id, because a command that deletes without asking must not
    find another session when it is repeated. Without ``--tenant``, an id that exists in several tenants is a
    usage error. Raise `SessionNotFound`.
    """
    directory = directory_of(options)
    session_id, tenants = text, directory.tenants_of(text)
    if not tenants and not is_whole and len(text) >= _SHORTEST_START:
        session_id, tenants = _started(text, directory)
    if not tenants:
        raise SessionNotFound(text)
    return directory.store(only_tenant(tenants, f"session {visible(session_id)}")), session_id


def whole_id(text: str, options: Mapping[str, Any]) -> str:
    """Return the session id that a filter selects. The session need not exist."""
    if directory_of(options).tenants_of(text):
        return text
    try:
        return chosen_session(text, options)[1]
    except SessionNotFound:
        return text


def _started(start: str, directory: SessionDirectory) -> tuple[str, list[str]]:
    """Return the only id that begins with ``start`` and its tenants, or no tenants if no id matches."""
    found = directory.starting_with(start, limit=_MATCHES_NAMED + 1)
    ids = list(dict.fromkeys(session_id for _, session_id in found))
    if len(ids) > 1:
        named = ", ".join(visible(session_id) for session_id in ids[:_MATCHES_NAMED])
        more = "" if len(found) <= _MATCHES_NAMED else " and others"
        raise WrongUsage(
            f"{visible(start)!r} is ambiguous: {named}{more} begin with it. Use more characters of the id."
        )
    return (ids[0] if ids else start), [tenant for tenant, _ in found]


def only_tenant(tenants: Sequence[str], what: str) -> str:
    """Return the only tenant. If there are several, raise `CommandError`, because the choice is ambiguous."""
    if len(tenants) > 1:
        named = ", ".join(f"'{visible(tenant)}'" for tenant in tenants[:_TENANTS_NAMED])
        more = "" if len(tenants) <= _TENANTS_NAMED else f" and {len(tenants) - _TENANTS_NAMED} more"
        raise WrongUsage(f"{len(tenants)} tenants have a {what}: {named}{more}. Give --tenant.")
    return tenants[0]


def chosen_call(store: DatabaseStateStore, session_id: str, text: str | None) -> tuple[str, str | None]:
    """Return the id and approval id of the call that ``text`` selects by its id or by the start of its id.

    ``None`` selects the only open call. If another session owns the call, only its id is known.
    """
    _, calls, open_calls = calls_of(Database(store.alias, store.tenant), session_id)
    if text is not None and (text in calls.pending or text in calls.completed):
        return text, _approval_id(calls.pending.get(text))
    matches = [call_id for call_id in open_calls if call_id.startswith(text or "")]
    if len(matches) == 1:
        return matches[0], _approval_id(open_calls[matches[0]])
    if matches:
        named = ", ".join(
            f"{visible(call_id)} ({visible(str(open_calls[call_id].get('tool_name')))})"
            for call_id in matches
        )
        raise WrongUsage(f"The session waits for {len(matches)} answers: {named}. Name one with --call.")
    if text is None:
        raise CommandError(f"The session {visible(session_id)} is not waiting for an answer.")
    return text, None


def _approval_id(call: Any) -> str | None:
    found = call.get("approval_id") if isinstance(call, Mapping) else None
    return found if isinstance(found, str) else None


# --- Checkpoints


class ChosenState(NamedTuple):
    """The state of a checkpoint, or the current state, which has no checkpoint id."""

    tenant: str
    checkpoint_id: str | None
    state: SessionState

    def to_dict(self) -> dict[str, Any]:
        state = self.state
        return {
            "tenant": self.tenant,
            "session_id": state.session_id,
            "checkpoint_id": self.checkpoint_id,
            "step_count": state.step_count,
            "message_count": state.message_count,
            "created_at": None if state.updated_at is None else state.updated_at.isoformat(),
        }


def chosen_checkpoint(
    text: str, options: Mapping[str, Any], *, is_whole: bool = False
) -> tuple[DatabaseStateStore, Checkpoint]:
    """Return the store and the checkpoint. Raise `SessionNotFound`, `CheckpointNotFound` or `CommandError`.

    See `chosen_session` for ``is_whole``.
    """
    named = _named_position(text, options)
    if named is None:
        store, session_id = chosen_session(text, options, is_whole=is_whole)
        return store, _before_the_newest(store, session_id, 0)
    if named.is_current:
        raise WrongUsage("The current state is not a checkpoint. " + CHECKPOINT_FORMS)
    if named.checkpoint_id is not None:
        store, session_id = chosen_session(named.session_id, options, is_whole=True)
        found = store.get_checkpoint(session_id, named.checkpoint_id)
        if found is None:
            raise CheckpointNotFound(text)
        return store, found
    store, session_id = chosen_session(named.session_id, options, is_whole=is_whole)
    if named.step is not None:
        return store, _of_step(store, session_id, named.step)
    return store, _before_the_newest(store, session_id, named.before)


def chosen_state(text: str, options: Mapping[str, Any]) -> ChosenState:
    """Return the state of `chosen_checkpoint`, or the current state for ``SESSION@current``."""
    named = _named_position(text, options)
    if named is None or not named.is_current:
        store, found = chosen_checkpoint(text, options)
        return ChosenState(store.tenant, found.checkpoint_id, found.state)
    store, session_id = chosen_session(named.session_id, options)
    state = store.load_state(session_id)
    if state is None:
        raise SessionNotFound(session_id)
    return ChosenState(store.tenant, None, state)


def _named_position(text: str, options: Mapping[str, Any]) -> Position | None:
    """Return the position in a session that ``text`` names, or ``None`` if it is the id of a session.

    A session id may look like a position in another session. If both sessions exist, the choice is a usage
    error, even if that checkpoint was pruned: what a name means must not depend on a prune.
    """
    named = named_position(text)
    directory = directory_of(options)
    if named is None or not _has_session(directory, text):
        return named
    if _has_session(directory, named.session_id):
        raise WrongUsage(
            f"'{visible(text)}' is the id of a session, and names a checkpoint of the session "
            f"'{visible(named.session_id)}'. Write '{visible(text)}@latest' for the newest checkpoint of the "
            "first one; for the second one, give the checkpoint in another of its forms. " + CHECKPOINT_FORMS
        )
    return None


def _has_session(directory: SessionDirectory, text: str) -> bool:
    try:
        return bool(directory.tenants_of(text))
    except InvalidPayload:
        # With a position behind it, an id may be longer than any id of a session.
        return False


def _of_step(store: DatabaseStateStore, session_id: str, number: int) -> Checkpoint:
    checkpoint_id = checkpoint_of_step(store, session_id, number)
    found = None if checkpoint_id is None else store.get_checkpoint(session_id, checkpoint_id)
    if found is None:
        name = visible(f"{session_id}@step-{number}")
        raise CommandError(f"There is no checkpoint {name}: the step was not committed, or it was pruned.")
    return found


def _before_the_newest(store: DatabaseStateStore, session_id: str, count: int) -> Checkpoint:
    cursor, left = None, count
    while True:
        page = store.list_checkpoints(session_id, limit=min(left + 1, _LARGEST_PAGE), cursor=cursor)
        if left < len(page.items):
            found = store.get_checkpoint(session_id, page.items[left].checkpoint_id)
            if found is not None:
                return found
        left -= len(page.items)
        cursor = page.next_cursor
        if cursor is None or left < 0:
            name = f"{session_id}@latest~{count}" if count else f"{session_id}@latest"
            raise CommandError(
                f"There is no checkpoint {visible(name)}. Checkpoints of the session: {page.total:,}."
            )


class StoreCommandWithParts(StoreCommand):
    """A command with sub-commands. The common options may come before or after its name."""

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        self.add_tenant_argument(parser)
        self.add_wide_argument(parser)
        self._subcommands = parser.add_subparsers(
            dest="part", required=True, metavar="sub-command", parser_class=StoreParser
        )
        self.add_parts()

    def add_parts(self) -> None:
        raise NotImplementedError

    def add_part(
        self, name: str, run: Callable[[dict[str, Any]], None], *, example: str, help: str | None = None
    ) -> CommandParser:
        """Add a sub-command. It calls ``run`` with the parsed options; the default help is the docstring of
        ``run``.
        """
        title = f"{type(self).__module__.rpartition('.')[2]} {name}"
        parser: CommandParser = self._subcommands.add_parser(
            name,
            help=help or run.__doc__,
            description=help or run.__doc__,
            epilog=f"example: manage.py {title} {example}".rstrip(),
            parents=[self._common_arguments()],
            formatter_class=DjangoHelpFormatter,
        )
        parser.set_defaults(run=run)
        return parser

    def handle(self, *args: Any, **options: Any) -> None:
        options["run"](options)

    def named_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """`call_command` accepts the options of all sub-commands, and does not know the flags of any."""
        own = self._part(options)._actions
        flags = {
            flag.lstrip("-").replace("-", "_"): each.dest for each in own for flag in each.option_strings
        }
        flags |= {each.dest: each.dest for each in own}
        of_parts = {each.dest for part in self._subcommands.choices.values() for each in part._actions}
        given = options.keys() - self._parser.parsed.keys()
        for name in sorted((given & of_parts) - flags.keys()):
            raise WrongUsage(f"The sub-command {options['part']} has no option {name!r}.")
        return {flags.get(name, name) if name in given else name: value for name, value in options.items()}

    def chosen_actions(self, options: Mapping[str, Any]) -> list[argparse.Action]:
        actions = self._part(options)._actions
        own = [action for action in actions if action.default != argparse.SUPPRESS]
        return super().chosen_actions(options) + own

    def _part(self, options: Mapping[str, Any]) -> CommandParser:
        parser: CommandParser = self._subcommands.choices[options["part"]]
        return parser

    def _common_arguments(self) -> StoreParser:
        """Return the options of the command itself. They keep their values unless they are given again."""
        parser = StoreParser(add_help=False)
        add_output_arguments(parser)
        self.add_tenant_argument(parser)
        self.add_wide_argument(parser)
        parser.add_argument("-v", "--verbosity", type=int, choices=[0, 1, 2, 3], help="0 is silent.")
        for name in ("--no-color", "--force-color", "--traceback", "--skip-checks"):
            parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
        for name in ("--settings", "--pythonpath"):
            parser.add_argument(name, help=argparse.SUPPRESS)
        for action in parser._actions:
            action.default = argparse.SUPPRESS
        return parser


class ActingCommand(StoreCommandWithParts):
    def add_action(self, action: SessionAction) -> None:
        """Add the sub-command of an action on a session."""
        name, run = action.command or action.name, partial(self._run, action)
        parser = self.add_part(name, run, help=action.help, example=action.example)
        parser.add_argument("session_id", metavar="ID")
        for flag, settings in action.options.items():
            parser.add_argument(flag, **settings)
        if action.is_destructive:
            self.add_confirmation_argument(parser)

    def target(
        self, action: SessionAction, options: Mapping[str, Any], *, is_whole: bool
    ) -> tuple[DatabaseStateStore, str, Mapping[str, Any]]:
        """Return the store, the session id and the arguments that the options specify."""
        return *chosen_session(options["session_id"], options, is_whole=is_whole), options

    def act(
        self,
        action: SessionAction,
        store: DatabaseStateStore,
        session_id: str,
        given: Mapping[str, Any],
        *,
        is_interactive: bool = False,
    ) -> dict[str, Any]:
        """Ask first if ``is_interactive``, run the action, and return its data. Raise `CommandError`."""
        if is_interactive:
            self.confirm(visible(action.preview(store, session_id, given)))
        outcome = action.run(store, session_id, given)
        if not outcome.is_done:
            raise CommandError(visible(outcome.problem or str(outcome.message)))
        return {"tenant": store.tenant, **outcome.data}

    def _run(self, action: SessionAction, options: dict[str, Any]) -> None:
        is_interactive = options.get("interactive", False)
        is_whole = action.is_destructive and not is_interactive
        store, session_id, given = self.target(action, options, is_whole=is_whole)
        data = self.act(action, store, session_id, given, is_interactive=is_interactive)
        self.write_data(data)
