"""The base of all management commands: database, output, progress, and stop by signal."""

from __future__ import annotations

import argparse
import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DEFAULT_DB_ALIAS, DatabaseError, connections

from helix_store.exceptions import HelixStoreError

__all__ = ["PROBLEMS_FOUND", "USAGE", "StoreCommand", "at_least", "table"]

PROBLEMS_FOUND: Final = 1
USAGE: Final = 2


class StoreCommand(BaseCommand):
    """Writes data to stdout and progress to stderr; no progress with ``-v 0``.

    Exit codes: 0 for success, 1 for problems found, 2 for wrong usage. The first SIGINT or SIGTERM sets
    `stop`, which the command checks between batches. The second one ends it at once.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stop = threading.Event()
        self.verbosity = 1

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--database", default=DEFAULT_DB_ALIAS, help="Alias of the database (default: %(default)s)."
        )
        parser.add_argument(
            "--format", choices=["table", "json"], default="table", help="Format of the data on stdout."
        )

    def execute(self, *args: Any, **options: Any) -> str | None:
        alias = options["database"]
        if alias not in connections:
            raise CommandError(f"There is no database {alias!r} in DATABASES.", returncode=USAGE)
        self.verbosity = options["verbosity"]
        self.stop.clear()
        try:
            with self._stopping_on_signals():
                return super().execute(*args, **options)
        except HelixStoreError as exc:
            raise CommandError(str(exc), returncode=PROBLEMS_FOUND) from exc
        except DatabaseError as exc:
            raise CommandError(
                f"The database refused a statement: {exc}. Has it been migrated?", returncode=PROBLEMS_FOUND
            ) from exc

    def progress(self, text: str) -> None:
        if self.verbosity > 0:
            self.stderr.write(text, style_func=str)
            self.stderr.flush()

    def write_data(self, data: Mapping[str, Any], *, form: str) -> None:
        """One object, as a line of JSON or a table of names and values."""
        if form == "json":
            self.stdout.write(json.dumps(data))
        else:
            self.stdout.write(table([[name.replace("_", " "), value] for name, value in data.items()]))
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
            for each in signals:
                signal.signal(each, before[each])

        for number in signals:
            signal.signal(number, stop)
        try:
            yield
        finally:
            for number in signals:
                signal.signal(number, before[number])


def at_least(minimum: int) -> Callable[[str], int]:
    """An argparse type: a whole number of at least the minimum."""

    def whole_number(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = minimum - 1
        if number < minimum:
            raise argparse.ArgumentTypeError(f"expected a whole number from {minimum}, got {text!r}")
        return number

    return whole_number


def table(rows: Sequence[Sequence[Any]]) -> str:
    """Rows as lines of aligned columns."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in texts)
    return "\n".join(line.rstrip() for line in lines)
