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
from typing import Any, Final, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import (
    BaseCommand,
    CommandError,
    CommandParser,
    OutputWrapper,
)
from django.db import DatabaseError, connections

from helix_store.engine.aliases import alias_of, app_aliases
from helix_store.engine.database import Database
from helix_store.engine.errors import is_unavailable
from helix_store.exceptions import (
    HelixStoreError,
    InvalidCursor,
    InvalidPayload,
    InvalidQuery,
    StoreUnavailable,
)
from helix_store.management.output import Column, Layout, ProgressBar, Table, pairs, table, terminal_width
from helix_store.management.text import encodable, visible

T = TypeVar("T")

_USAGE: Final = 2


class WrongUsage(CommandError):
    """Wrong usage of a command. It exits with 2; any other `CommandError` exits with 1."""

    def __init__(self, message: str) -> None:
        super().__init__(message, returncode=_USAGE)


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
    def layout(self) -> Layout:
        """The layout of tables: as wide as the terminal unless ``--wide`` is given. Colours are off if there
        is no terminal, and with ``--no-color``, ``NO_COLOR`` or ``DJANGO_COLORS``.
        """
        width = None if self._is_wide else terminal_width()
        is_allowed = self._forces_colour or (self.stdout.isatty() and not os.environ.get("NO_COLOR"))
        return Layout(width, has_colours=is_allowed and self.style.SUCCESS("x") != "x")

    def takes_one_database(self, options: Mapping[str, Any]) -> bool:
        """Return whether the command reads or writes one file, and so cannot use several databases."""
        return False

    def rounds(self, options: Mapping[str, Any]) -> Iterator[None]:
        """Yield once for each round over the databases. By default there is one round."""
        yield

    def execute(self, *args: Any, **options: Any) -> str | None:
        aliases = _chosen_databases(options)
        if len(aliases) > 1 and self.takes_one_database(options):
            raise WrongUsage("This command works on one database at a time.")
        self.verbosity = options["verbosity"]
        self.is_json = options["format"] == "json"
        self._is_wide = bool(options.get("wide"))
        self._forces_colour = bool(options.get("force_color"))
        self.stop.clear()
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
        return None

    def _execute_on_each(
        self, aliases: Sequence[str], failures: dict[str, CommandError], *args: Any, **options: Any
    ) -> None:
        """Run on each database. Several are named above the output, or as keys of the JSON."""
        has_several = len(aliases) > 1
        for alias in aliases:
            is_first = alias == aliases[0]
            if has_several and self.is_json:
                self.write_text(f"{'{' if is_first else ', '}{json.dumps(alias)}: ", ending="")
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
            super().execute(*args, **options)
        except BrokenPipeError:
            # The reader has closed the pipe, as `head` does, but the interpreter flushes the buffer at exit.
            with suppress(OSError, ValueError, AttributeError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(1) from None
        except (ImproperlyConfigured, InvalidCursor, InvalidPayload, InvalidQuery) as exc:
            raise WrongUsage(str(exc)) from exc
        except HelixStoreError as exc:
            raise CommandError(str(exc)) from exc
        except DatabaseError as exc:
            if is_unavailable(Database(options["database"], "").connection, exc):
                raise CommandError(str(StoreUnavailable())) from exc
            raise CommandError(f"The database refused a statement: {exc}. Has it been migrated?") from exc

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
        parser.add_argument(
            "--no-input",
            "--noinput",
            action="store_false",
            dest="interactive",
            help="Do not ask for confirmation.",
        )

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
        self.stdout.write(encodable(text, getattr(self.stdout, "encoding", None)), ending=ending)
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


def add_limit_argument(parser: CommandParser, what: str, *, default: int) -> None:
    help = f"At most this many {what} (default: %(default)s)."
    parser.add_argument("--limit", type=at_least(1), default=default, help=help)


def refuse_options(options: Mapping[str, Any], names: Iterable[str], reason: str) -> None:
    """Raise a usage error if one of the options is given."""
    for name in names:
        if options[name]:
            raise WrongUsage(f"{reason} --{name.replace('_', '-')}.")
