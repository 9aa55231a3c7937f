"""``helix_export``: write sessions with all their data as JSON Lines."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from typing import IO, Any

from django.core.management.base import CommandError, CommandParser

from helix_store.management.base import StoreCommand, WrongUsage, whole_id
from helix_store.management.output import cell, shown_json, visible
from helix_store.transfer import DatabaseSource, ExportSummary, write_export


class Command(StoreCommand):
    help = (
        "Write sessions with all their data as JSON Lines, to stdout or a file. The file shows one moment of "
        "the database; writers do not wait. helix_import reads it into any database."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        self.add_tenant_argument(parser)
        parser.epilog = "example: manage.py helix_export --session trip-1 --tree"
        parser.add_argument(
            "--session",
            action="extend",
            nargs="+",
            metavar="ID",
            help="Only the sessions with these ids; may be repeated (default: all sessions).",
        )
        parser.add_argument(
            "--tree", action="store_true", help="With --session: also all sub-sessions below these."
        )
        parser.add_argument(
            "--output",
            metavar="FILE",
            help="A file, which is replaced at the end (default: stdout).",
        )

    def takes_one_database(self, options: Mapping[str, Any]) -> bool:
        return True

    def handle(self, *args: Any, **options: Any) -> None:
        if options["tree"] and options["session"] is None:
            raise WrongUsage("--tree needs --session; without it, all sessions are exported.")
        given = options["session"]
        if given is not None and not given:
            raise WrongUsage("--session needs an ID; leave it out to export all sessions.")
        source = DatabaseSource(
            options["database"],
            tenant=options["tenant"],
            session_ids=None if given is None else [whole_id(text, options) for text in given],
            with_trees=options["tree"],
        )
        output = None if options["output"] is None else Path(options["output"])
        is_of_nothing = False
        if output is None:
            with self._to_stdout() as file:
                summary = self._export(source, file, options)
        else:
            with _written(output) as (file, keep):
                summary = self._export(source, file, options)
                is_of_nothing = given is not None and not any(summary.counts.values())
                if summary.sha256 is not None and not is_of_nothing:
                    keep()
        self._write_summary(summary, to_stdout=output is not None)
        if summary.sha256 is None:
            left = "The output has no trailer." if output is None else f"{output} is unchanged."
            raise CommandError(f"Stopped after {summary.sessions} sessions. {left}")
        if output is not None and is_of_nothing:
            found = "; ".join(map(str, summary.problems)) or "There is nothing to export"
            raise CommandError(f"{found.rstrip('.')}. {output} was not written.")
        if summary.problems:
            raise CommandError(f"{len(summary.problems)} problems were found.")

    def _export(self, source: DatabaseSource, file: Any, options: Mapping[str, Any]) -> ExportSummary:
        if options["session"] is None and options["tenant"] is not None and source.is_empty:
            output = options["output"]
            outcome = "Nothing was exported." if output is None else f"{output} was not written."
            raise CommandError(
                f"Nothing is stored for the tenant {cell(options['tenant'])!r} in the database "
                f"{options['database']!r}. {outcome}"
            )
        with self.progress_bar("sessions", total=source.session_count) as bar:
            return write_export(
                source, file, progress=lambda done: bar.update(done.sessions), is_stopped=self.stop.is_set
            )

    def _write_summary(self, summary: ExportSummary, *, to_stdout: bool) -> None:
        """Write the summary to stdout, or to stderr if the export itself goes to stdout."""
        for problem in summary.problems:
            self.progress(str(problem))
        data = summary.to_dict()
        if to_stdout and self.is_json:
            self.write_data(data)
        elif to_stdout:
            self.write_data({**data["records"], "sha256": summary.sha256})
        elif self.is_json:
            self.progress(json.dumps(data))
        else:
            self.progress(f"{summary.sessions} sessions, {sum(summary.counts.values())} records")

    @contextmanager
    def _to_stdout(self) -> Iterator[Any]:
        if self.stdout.isatty():
            self.progress(
                "In a terminal, invisible characters are shown as \\uXXXX; use --output for a file to import."
            )
            yield SimpleNamespace(write=lambda data: self.write_text(shown_json(data.decode()), ending=""))
            return
        buffer = getattr(self.stdout, "buffer", None)
        if buffer is None:
            yield SimpleNamespace(write=lambda data: self.stdout.write(data.decode(), ending=""))
            return
        try:
            yield buffer
            buffer.flush()
        except BrokenPipeError as exc:
            # Otherwise Python would fail at exit, when it flushes the bytes that the pipe has not accepted.
            os.dup2(os.open(os.devnull, os.O_WRONLY), buffer.fileno())
            raise CommandError("The reader of stdout has exited; the export is not complete.") from exc


@contextmanager
def _written(path: Path) -> Iterator[tuple[IO[bytes], Callable[[], None]]]:
    """Yield a file to write, and the call that keeps it. A new file, which only its owner can read, replaces
    the one that ``path`` names, or the one that a link there leads to. A device or a pipe, such as
    ``/dev/null``, is written directly: it must stay what it is, and has no earlier export to keep.
    """
    try:
        is_direct = path.exists() and not path.is_file()
        path = path if is_direct else path.resolve()
        file: Any = (
            path.open("wb")
            if is_direct
            else NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False)  # noqa: SIM115
        )
    except OSError as exc:
        raise WrongUsage(f"{visible(str(path))} cannot be written: {exc.strerror}.") from exc

    def keep() -> None:
        file.flush()
        os.fsync(file.fileno())
        Path(file.name).replace(path)

    try:
        with file:
            yield file, file.flush if is_direct else keep
    finally:
        if not is_direct:
            Path(file.name).unlink(missing_ok=True)
