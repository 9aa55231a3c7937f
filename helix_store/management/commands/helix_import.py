"""``helix_import``: read sessions from an export, or from another store, into a database."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, Any, Final

from django.core.management.base import CommandError, CommandParser

from helix_store.management.base import StoreCommand, WrongUsage, refuse_options
from helix_store.management.output import ProgressBar, cell, visible
from helix_store.transfer import ExportFile, ImportSummary, import_units
from helix_store.transfer.records import Counts, Unit
from helix_store.transfer.sources import SOURCES, Origin

_OF_A_STORE: Final = ("schema", "table", "only_whole", "leave_tables", "dry_run")


class Command(StoreCommand):
    help = (
        "Read an export of helix_export, or with --from the tables of another store, into a database: each "
        "session in one transaction, and checked. A session that is already stored is never overwritten, "
        "and is skipped if it is identical. May be run again after a stop."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.epilog = "example: manage.py helix_import sessions.jsonl"
        parser.add_argument(
            "--tenant",
            help="Import only this tenant of a file (default: every tenant). With --from, the tenant that "
            "the sessions get (default: the empty one).",
        )
        parser.add_argument(
            "file", nargs="?", metavar="FILE", help="A file of helix_export (default: stdin)."
        )
        store = parser.add_argument_group("another store")
        store.add_argument(
            "--from",
            dest="source",
            nargs=2,
            metavar=("STORE", "ADDRESS"),
            help=f"Read the tables of {' or '.join(SOURCES)}. The address is the connection string of a "
            "PostgreSQL database, which needs no password if ~/.pgpass or a service file contains it, or "
            "the path of an SQLite file.",
        )
        store.add_argument("--schema", help="The schema of the tables (default: the store's own).")
        store.add_argument("--table", help="The table, if the store lets you name it (default: its own).")
        store.add_argument(
            "--only-whole",
            action="store_true",
            help="Leave out a session that has a row with a fault (default: leave out that row).",
        )
        store.add_argument(
            "--leave-tables",
            action="store_true",
            help="Accept that tables without a counterpart, such as entities and facts, are not imported.",
        )
        store.add_argument(
            "--dry-run",
            action="store_true",
            help="Read and count all rows, report problems, and store nothing.",
        )

    def takes_one_database(self, options: Mapping[str, Any]) -> bool:
        return True

    def execute(self, *args: Any, **options: Any) -> str | None:
        # Without a choice, the routers place each tenant: a file may have tenants of several databases.
        self._is_routed = not options.get("database") and not options.get("all_databases")
        return super().execute(*args, **options)

    def handle(self, *args: Any, **options: Any) -> None:
        if options["source"] is None:
            refuse_options(options, _OF_A_STORE, "--from is missing for")
            summary, was_stopped = self._import_file(options)
            counts: dict[str, Counts] = {}
        else:
            if options["file"]:
                raise WrongUsage("--from does not take FILE.")
            summary, was_stopped, counts = self._import_store(options)
        self._write(summary, counts)
        if was_stopped:
            raise CommandError(f"Stopped after {summary.sessions} sessions; run it again to continue.")
        if summary.problems:
            raise CommandError(f"{len(summary.problems)} problems were found.")
        if options["source"] is None and options["tenant"] is not None and _is_of_nothing(summary):
            raise CommandError(
                f"The file has nothing of the tenant {cell(options['tenant'])!r}; parts of other tenants: "
                f"{summary.other_tenants:,}. Nothing was imported."
            )

    def _import_file(self, options: dict[str, Any]) -> tuple[ImportSummary, bool]:
        with _opened(options["file"]) as stream, self.progress_bar("sessions") as bar:
            export = ExportFile(stream)
            summary = import_units(
                export.units(),
                None if self._is_routed else options["database"],
                tenant=options["tenant"],
                progress=lambda done: bar.update(done.sessions),
                is_stopped=self.stop.is_set,
            )
        was_stopped = not summary.is_complete
        summary.is_complete = summary.is_complete and export.is_complete
        summary.problems = sorted([*summary.problems, *export.problems], key=lambda each: each.line or 0)
        return summary, was_stopped

    def _import_store(self, options: dict[str, Any]) -> tuple[ImportSummary, bool, dict[str, Counts]]:
        name, dsn = options["source"]
        if name not in SOURCES:
            raise WrongUsage(f"--from reads {' and '.join(SOURCES)}, not {name!r}.")
        source = SOURCES[name](
            Origin(
                dsn=dsn,
                tenant=options["tenant"] or "",
                schema=options["schema"],
                table=options["table"],
                only_whole=options["only_whole"],
                leaves_tables=options["leave_tables"],
            )
        )
        with source.reading(), self.progress_bar("sessions", total=source.session_count) as bar:
            if options["dry_run"]:
                summary = self._read(source.units(), bar)
            else:
                summary = import_units(
                    source.units(),
                    options["database"],
                    tenant=options["tenant"] or "",
                    progress=lambda done: bar.update(done.sessions),
                    is_stopped=self.stop.is_set,
                    reads_back=True,
                )
            if summary.is_complete:
                summary.problems.extend(source.left_out(summary.records))
        summary.problems.extend(source.tally.problems)
        return summary, not summary.is_complete, {"source": source.tally.found, "left": source.tally.left}

    def _read(self, units: Iterable[Unit], bar: ProgressBar) -> ImportSummary:
        """Read the units without writing them. A unit is read and converted before it is yielded.

        The database is not used, so a dry run is possible before it has space for the sessions.
        """
        summary = ImportSummary()
        for number, _ in enumerate(units, start=1):
            if self.stop.is_set():
                return summary
            bar.update(number)
        summary.is_complete = True
        return summary

    def _write(self, summary: ImportSummary, counts: dict[str, Counts]) -> None:
        """Write the summary. ``counts`` has the numbers of rows in the other store."""
        for problem in summary.problems:
            self.progress(str(problem))
        data = summary.to_dict()
        if not self.is_json:
            data = {
                "imported sessions": summary.imported["session"],
                "identical sessions": summary.identical["session"],
                "problems": len(summary.problems),
                **data["records"],
            }
            for title, rows in counts.items():
                data |= {f"{table} ({title})": count for table, count in sorted(rows.items())}
        else:
            data |= {title: dict(sorted(rows.items())) for title, rows in counts.items()}
        self.write_data(data)


def _is_of_nothing(summary: ImportSummary) -> bool:
    """Return whether nothing was imported, and nothing had been imported before."""
    return not (summary.imported or summary.identical)


def _opened(path: str | Path | None) -> AbstractContextManager[IO[bytes]]:
    if path is None:
        return nullcontext(sys.stdin.buffer)
    try:
        return Path(path).open("rb")
    except OSError as exc:
        raise WrongUsage(f"{visible(str(path))} cannot be read: {exc.strerror}.") from exc
