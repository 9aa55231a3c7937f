"""``helix_doctor``: report the problems of a session database and how to fix them."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from django.core.management.base import CommandError, CommandParser

from helix_store.doctor import Diagnosis, Fault, Listener, all_checks, diagnose
from helix_store.doctor.findings import Check
from helix_store.management.base import StoreCommand
from helix_store.management.output import Column, ProgressBar, Style, pairs, visible

_STYLES: dict[str, Style] = {"error": "red", "warning": "yellow", "info": "cyan"}
_COLUMNS = (
    Column("severity", attrgetter("severity.value"), cut="never", style=_STYLES.get),
    Column("finding", attrgetter("id"), cut="never"),
    Column("table", attrgetter("table")),
    Column("count", attrgetter("count"), cut="never", right=True),
    Column("fixed", attrgetter("fixed"), cut="never", right=True),
    Column("samples", lambda finding: ", ".join(map(str, finding.samples)) or None, minimum=6),
)
_SIZE_COLUMNS = (
    Column("table", attrgetter("table"), minimum=16),
    Column("rows, estimated", lambda size: _number(size.rows), cut="never", right=True),
    Column("table bytes", lambda size: _number(size.table_bytes), cut="never", right=True),
    Column("index bytes", lambda size: _number(size.index_bytes), cut="never", right=True),
)


class Command(StoreCommand):
    help = (
        "Examine a database: schema, settings, durability, stored texts, and the invariants between rows. "
        "Explains what to do about each finding, and exits with 1 if there is a problem."
    )
    # The doctor also reports problems with the settings.
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        self.add_tenant_argument(parser)
        self.add_wide_argument(parser)
        parser.add_argument(
            "--session", metavar="ID", help='Only this session, of the tenant "" unless --tenant is given.'
        )
        parser.add_argument(
            "--fix", action="store_true", help="Fix what is safe to fix, each row in one transaction."
        )
        parser.add_argument(
            "--dry-run", action="store_true", help="With --fix: only report what would be fixed."
        )
        parser.add_argument("--deploy", action="store_true", help="Also run the checks of check --deploy.")
        parser.epilog = "example: manage.py helix_doctor --session trip-1"

    def handle(self, *args: Any, **options: Any) -> None:
        with self.progress_bar("checks", total=len(all_checks())) as bar:
            diagnosis = diagnose(
                using=options["database"],
                tenant=options["tenant"],
                session_id=options["session"],
                fix=options["fix"],
                dry_run=options["dry_run"],
                deploy=options["deploy"],
                listener=_Reporter(self, bar, dry_run=options["dry_run"]),
            )
        if diagnosis.stopped_at is None and options["session"] is None:
            self.look_for_tenant(options)
        if self.is_json:
            self.write_data(diagnosis.to_dict())
        else:
            self._write(diagnosis)
        if diagnosis.stopped_at is not None:
            self.progress(f"Stopped at {diagnosis.stopped_at}. Run it again to examine the rest.")
        problems = sum(finding.is_problem for finding in diagnosis.findings)
        if problems:
            raise CommandError(f"Findings that are problems: {problems}.")
        if diagnosis.stopped_at is not None:
            raise CommandError("The examination is not complete.")

    def _write(self, diagnosis: Diagnosis) -> None:
        self.write_text(f"database {visible(diagnosis.database)}, schema version {diagnosis.schema_version}")
        if diagnosis.findings:
            self.write_text("")
            self.write_table(_COLUMNS, diagnosis.findings)
            advice = {finding.id: f"{finding.what} {finding.advice}" for finding in diagnosis.findings}
            self.write_text("\n" + pairs(advice.items(), self.layout))
        else:
            self.write_text("No findings.")
        if diagnosis.tables:
            self.write_text("")
            self.write_table(_SIZE_COLUMNS, diagnosis.tables)


class _Reporter(Listener):
    """A listener that draws progress, announces each fix before it is made, and forwards a signal."""

    def __init__(self, command: StoreCommand, bar: ProgressBar, *, dry_run: bool) -> None:
        self._command = command
        self._bar = bar
        self._verb = "Would fix" if dry_run else "Fixing"

    def examined(self, check: Check, done: int, total: int, rows: int) -> None:
        self._bar.update(done)

    def fixes(self, fault: Fault, action: str) -> None:
        self._command.progress(f"{self._verb} {_location(fault)}: {action}.")

    def left(self, fault: Fault) -> None:
        self._command.progress(f"Not safe to fix {_location(fault)}: see what to do.")

    def must_stop(self) -> bool:
        return self._command.stop.is_set()


def _location(fault: Fault) -> str:
    tenant = f" of tenant {visible(fault.sample.tenant)}" if fault.sample.tenant else ""
    return f"{fault.rule_id} of {fault.table} {visible(str(fault.sample))}{tenant}"


def _number(value: int | None) -> str | None:
    return None if value is None else f"{value:,}"
