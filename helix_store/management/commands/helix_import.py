"""``helix_import``: read sessions from an export into a database."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from django.core.management.base import CommandError, CommandParser

from helix_store.management.base import PROBLEMS_FOUND, USAGE, StoreCommand
from helix_store.transfer import ExportFile, ImportSummary, import_units

__all__ = ["Command"]


class Command(StoreCommand):
    help = (
        "Read an export of helix_export into a database: each session in one transaction, checked against "
        "its sha256. A session that is stored already is skipped if it is identical, and never overwritten. "
        "May be run again after a stop."
    )

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        epilog = "example: manage.py helix_import sessions.jsonl"
        return super().create_parser(prog_name, subcommand, epilog=epilog, **kwargs)

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        self.add_tenant_argument(parser)
        parser.add_argument(
            "file", nargs="?", type=Path, metavar="FILE", help="A file of helix_export (default: stdin)."
        )

    def handle(self, *args: Any, **options: Any) -> None:
        with _opened(options["file"]) as stream, self.progress_bar("sessions") as bar:
            export = ExportFile(stream)
            summary = import_units(
                export.units(),
                options["database"],
                tenant=options["tenant"],
                progress=lambda done: bar.update(done.sessions),
                is_stopped=self.stop.is_set,
            )
        was_stopped = not summary.is_complete
        summary.is_complete = summary.is_complete and export.is_complete
        summary.problems = sorted([*summary.problems, *export.problems], key=lambda each: each.line or 0)
        self._write(summary, options)
        if was_stopped:
            raise CommandError(
                f"Stopped after {summary.sessions} sessions; run it again to continue.",
                returncode=PROBLEMS_FOUND,
            )
        if summary.problems:
            raise CommandError(f"{len(summary.problems)} problems were found.", returncode=PROBLEMS_FOUND)

    def _write(self, summary: ImportSummary, options: dict[str, Any]) -> None:
        for problem in summary.problems:
            self.progress(str(problem))
        data = summary.to_dict()
        if options["format"] == "table":
            data = {
                "imported sessions": summary.imported["session"],
                "identical sessions": summary.identical["session"],
                "problems": len(summary.problems),
                **data["records"],
            }
        self.write_data(data, form=options["format"])


@contextmanager
def _opened(path: Path | None) -> Iterator[IO[bytes]]:
    if path is None:
        yield sys.stdin.buffer
        return
    try:
        file = path.open("rb")
    except OSError as exc:
        raise CommandError(f"{path} cannot be read: {exc.strerror}.", returncode=USAGE) from exc
    with file:
        yield file
