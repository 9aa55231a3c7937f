"""The base of all management commands: databases, output, progress and signals."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Final, TextIO, cast

from django.core.management.base import (
    BaseCommand,
    CommandError,
    CommandParser,
    DjangoHelpFormatter,
    OutputWrapper,
)
from django.db import DatabaseError

from helix_store.engine.database import Database
from helix_store.engine.errors import is_unavailable
from helix_store.engine.interrupts import interruptible
from helix_store.exceptions import HelixStoreError, InvalidCursor, InvalidQuery, StoreUnavailable
from helix_store.management.databases import OutputOfEach, add_database_arguments, chosen_databases
from helix_store.management.output import Colours, Column, ProgressBar, Table, pairs, terminal_width
from helix_store.management.text import encodable

__all__ = [
    "PROBLEMS_FOUND",
    "USAGE",
    "StoreCommand",
    "StoreCommandWithParts",
    "add_output_arguments",
    "at_least",
]

PROBLEMS_FOUND: Final = 1
USAGE: Final = 2


class StoreCommand(BaseCommand):
    """A command that writes data to stdout and progress to stderr. ``-v 0`` turns progress off.

    With several databases, it runs on each in turn and continues after problems. The worst exit code wins.

    The exit codes are 0 for success, 1 for problems found and 2 for wrong usage. The first SIGINT or SIGTERM
    sets `stop`, which the command checks between batches, and ends a block of `one_statement`. The second
    signal ends the command at once.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stop = threading.Event()
        self.verbosity = 1
        self._stops_at_once = False
        self._is_wide = False
        self._forces_colour = False

    def add_arguments(self, parser: CommandParser) -> None:
        add_output_arguments(parser)

    def add_tenant_argument(self, parser: CommandParser) -> None:
        parser.add_argument("--tenant", help="Only this tenant (default: every tenant).")

    def add_wide_argument(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--wide", action="store_true", help="Print whole cells, however wide the terminal is."
        )

    @property
    def width(self) -> int | None:
        """The number of cells that a line may take, or ``None`` with ``--wide``."""
        return None if self._is_wide else terminal_width()

    @property
    def colours(self) -> Colours:
        """The colours: off without a terminal and with ``--no-color``, ``NO_COLOR`` or ``DJANGO_COLORS``."""
        is_allowed = self._forces_colour or (self.stdout.isatty() and not os.environ.get("NO_COLOR"))
        return Colours(is_on=is_allowed and self.style.SUCCESS("x") != "x")

    def takes_one_database(self, options: Mapping[str, Any]) -> bool:
        """Return whether the command reads or writes one file, and so cannot use several databases."""
        return False

    def rounds(self, options: Mapping[str, Any]) -> Iterator[None]:
        """Yield once for each round over the databases. By default there is one round."""
        yield

    def execute(self, *args: Any, **options: Any) -> str | None:
        try:
            aliases = chosen_databases(options)
        except InvalidQuery as exc:
            raise CommandError(str(exc), returncode=USAGE) from exc
        if len(aliases) > 1 and self.takes_one_database(options):
            raise CommandError("This command works on one database at a time.", returncode=USAGE)
        self.verbosity = options["verbosity"]
        self._is_wide = bool(options.get("wide"))
        self._forces_colour = bool(options.get("force_color"))
        self.stop.clear()
        for name in ("stdout", "stderr"):
            if given := options.pop(name, None):
                setattr(self, name, OutputWrapper(given))
        failures: dict[str, CommandError] = {}
        with self._stopping_on_signals():
            for _ in self.rounds(options):
                if len(aliases) == 1:
                    self._collect(failures, aliases[0], *args, **options)
                else:
                    self._execute_on_each(aliases, failures, *args, **options)
        if len(aliases) == 1 and failures:
            raise failures[aliases[0]]
        if failures:
            told = "\n".join(f"database {alias}: {exc}" for alias, exc in failures.items())
            raise CommandError(told, returncode=max(exc.returncode for exc in failures.values()))
        return None

    def _execute_on_each(
        self, aliases: Sequence[str], failures: dict[str, CommandError], *args: Any, **options: Any
    ) -> None:
        stdout = self.stdout
        output = OutputOfEach(stdout, is_json=options["format"] == "json")
        self.stdout = OutputWrapper(cast("TextIO", output))
        try:
            for alias in aliases:
                output.begin(alias)
                try:
                    self._collect(failures, alias, *args, **options)
                except CommandError as exc:
                    # This may be wrong usage for this database, but not for the databases that are already
                    # done.
                    if exc.returncode == USAGE and alias == aliases[0]:
                        raise
                    failures[alias] = exc
                options["skip_checks"] = True
                if self.stop.is_set():
                    break
            output.end()
        finally:
            self.stdout = stdout

    def _collect(self, failures: dict[str, CommandError], alias: str, *args: Any, **options: Any) -> None:
        """Run on one database. Problems that it reports do not end a command with several rounds."""
        try:
            self._execute(*args, **{**options, "database": alias})
        except CommandError as exc:
            if exc.returncode == USAGE or exc.__cause__ is not None:
                raise
            failures[alias] = exc

    def _execute(self, *args: Any, **options: Any) -> None:
        """Run on one database."""
        try:
            super().execute(*args, **options)
        except BrokenPipeError:
            # The reader has closed the pipe, as `head` does.
            _forget_stdout()
            raise SystemExit(PROBLEMS_FOUND) from None
        except (InvalidCursor, InvalidQuery) as exc:
            raise CommandError(str(exc), returncode=USAGE) from exc
        except HelixStoreError as exc:
            raise CommandError(str(exc), returncode=PROBLEMS_FOUND) from exc
        except DatabaseError as exc:
            if is_unavailable(Database(options["database"], "").connection, exc):
                raise CommandError(str(StoreUnavailable()), returncode=PROBLEMS_FOUND) from exc
            raise CommandError(
                f"The database refused a statement: {exc}. Has it been migrated?", returncode=PROBLEMS_FOUND
            ) from exc

    def progress(self, text: str) -> None:
        if self.verbosity > 0:
            self.stderr.write(text, style_func=str)
            self.stderr.flush()

    def progress_bar(self, unit: str, *, total: int | None = None) -> ProgressBar:
        """Return a progress bar on stderr, which is silent with ``-v 0``."""

        def write(text: str) -> None:
            self.stderr.write(
                encodable(text, getattr(self.stderr, "encoding", None)), style_func=str, ending=""
            )
            self.stderr.flush()

        return ProgressBar(
            write,
            unit=unit,
            total=total,
            is_terminal=self.stderr.isatty() and os.environ.get("TERM") != "dumb",
            is_silent=self.verbosity == 0,
        )

    def add_confirmation_argument(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--no-input",
            "--noinput",
            action="store_false",
            dest="interactive",
            help="Do not ask for confirmation.",
        )

    def confirm(self, question: str, *, is_interactive: bool) -> None:
        """Ask on stderr and continue if stdin answers "yes". Any other answer ends the command."""
        if not is_interactive:
            return
        self._stops_at_once = True
        try:
            self.stderr.write(f"{question} Type 'yes' to continue: ", style_func=str, ending="")
            self.stderr.flush()
            answer = sys.stdin.readline()
        except KeyboardInterrupt:
            answer = "no"
        finally:
            self._stops_at_once = False
        if not answer:
            raise CommandError(
                "There is no answer on stdin; nothing was changed. Use --no-input.", returncode=USAGE
            )
        if answer.strip() != "yes":
            raise CommandError("Nothing was changed.", returncode=PROBLEMS_FOUND)

    @contextmanager
    def one_statement(self, alias: str, stopped: str) -> Iterator[None]:
        """Run one long statement in a block. The first signal cancels it and reports ``stopped``."""
        self._stops_at_once = True
        try:
            with interruptible(Database(alias, tenant="")):
                yield
        except (KeyboardInterrupt, DatabaseError, HelixStoreError):
            if not self.stop.is_set():
                raise
            raise CommandError(stopped, returncode=PROBLEMS_FOUND) from None
        finally:
            self._stops_at_once = False

    def write_data(self, data: Mapping[str, Any], *, form: str) -> None:
        """Write one object, as a line of JSON or as a table of names and values."""
        if form == "json":
            self.write_text(json.dumps(data))
        else:
            values = ((name.replace("_", " "), value) for name, value in data.items())
            self.write_text(pairs(values, width=self.width, colours=self.colours))

    def write_list(
        self,
        name: str,
        pages: Iterable[Any],
        *,
        columns: Sequence[Column],
        row: Callable[[Any], Sequence[Any]],
        to_dict: Callable[[Any], Mapping[str, Any]],
        form: str,
    ) -> None:
        """Write the items ``name`` of pages as a table or one JSON object, until a signal stops it."""
        table = Table(columns, width=self.width, colours=self.colours)
        # The opening text waits for the first page, so that the output is empty if the database does not
        # answer.
        separator = opening = f'{{"{name}": ['
        listed, rest = 0, dict[str, Any]()
        with self.progress_bar(name) as progress:
            for page in pages:
                items = getattr(page, name)
                if not rest and hasattr(page, "total"):
                    rest["total"] = page.total
                rest["next_cursor"] = page.next_cursor
                if form == "json":
                    for item in items:
                        self.stdout.write(f"{separator}{json.dumps(to_dict(item))}", ending="")
                        separator = ", "
                else:
                    self.write_text("\n".join(table.lines(map(row, items))))
                listed += len(items)
                progress.update(listed)
                if self.stop.is_set():
                    break
        if form == "json":
            self.write_text(f"{opening if separator == opening else ''}], {json.dumps(rest)[1:]}")
        else:
            if rest.get("total") is not None:
                self.progress(f"{rest['total']:,} {name} match.")
            if rest.get("next_cursor") is not None:
                self.progress(f"More {name} follow: --cursor {rest['next_cursor']}")
        if self.stop.is_set():
            self.progress(f"Stopped after {listed:,} {name}; --cursor continues.")

    def write_text(self, text: str) -> None:
        """Write lines to stdout, and escape the characters that its encoding cannot represent."""
        self.stdout.write(encodable(text, getattr(self.stdout, "encoding", None)))
        self.stdout.flush()

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


class StoreCommandWithParts(StoreCommand):
    """A command with sub-commands. The common options are allowed before and after the sub-command's name."""

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        self.add_tenant_argument(parser)
        self.add_wide_argument(parser)
        parts = parser.add_subparsers(dest="part", required=True, metavar="sub-command")
        self.add_parts(parts)

    def add_parts(self, parts: Any) -> None:
        raise NotImplementedError

    def add_part(
        self, parts: Any, name: str, run: Callable[[dict[str, Any]], None], *, help: str, epilog: str
    ) -> CommandParser:
        """Add a sub-command. It calls ``run`` with the parsed options."""
        parser: CommandParser = parts.add_parser(
            name,
            help=help,
            description=help,
            epilog=epilog,
            parents=[self._common_arguments()],
            formatter_class=DjangoHelpFormatter,
        )
        parser.set_defaults(run=run)
        return parser

    def handle(self, *args: Any, **options: Any) -> None:
        options["run"](options)

    def _common_arguments(self) -> CommandParser:
        """Return the options of the command itself. They keep their values unless they are given again."""
        parser = CommandParser(add_help=False)
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


def add_output_arguments(parser: CommandParser) -> None:
    """Add the options that every command has."""
    add_database_arguments(parser)
    parser.add_argument(
        "--format", choices=["table", "json"], default="table", help="Format of the data on stdout."
    )


def _forget_stdout() -> None:
    """Discard the buffer that the interpreter flushes when it exits."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def at_least(minimum: int) -> Callable[[str], int]:
    """Return an argparse type for a whole number that is at least the minimum."""

    def whole_number(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = minimum - 1
        if number < minimum:
            raise argparse.ArgumentTypeError(f"expected a whole number from {minimum}, got {text!r}")
        return number

    return whole_number
