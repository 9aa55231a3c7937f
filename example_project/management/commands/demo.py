"""``manage.py demo``: fill a database with agent sessions that you can view in the admin."""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from django.conf import settings
from django.contrib.auth.models import User
from django.core.management import BaseCommand, CommandError, CommandParser, call_command
from django.db import connections, router
from django.db.migrations.executor import MigrationExecutor
from django.urls import reverse

from example_project.command_lines import approval_line, server_line
from example_project.demo import Emphasis, TripSummary, demonstrate_agent
from example_project.replay import ReplaySummary, replay_file
from example_project.transcripts import TranscriptError
from helix_store.exceptions import HelixStoreError
from helix_store.models import Session
from helix_store.stores import Store

DEMO_USER = "demo"
ADDRESS = "http://127.0.0.1:8000"
SAMPLE = Path(__file__).resolve().parents[2] / "sample_transcripts.json"


class Command(BaseCommand):
    help = (
        "Fill a database with sessions: a scripted agent with tools, a sub-agent, an approval, a payment and "
        "killed workers; or recorded conversations."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--database",
            default=router.db_for_write(Session),
            choices=tuple(connections),
            help="Default: %(default)s.",
        )
        parser.add_argument("--tenant", default="", help="The tenant that the sessions belong to.")
        parser.add_argument(
            "--transcripts",
            nargs="?",
            type=existing_file,
            const=SAMPLE,
            metavar="FILE",
            help=(
                "Replay recorded conversations in OpenAI chat format (JSON or JSON Lines, plain or .xz) "
                "instead; without FILE a small sample."
            ),
        )
        parser.add_argument(
            "--verify",
            action="store_true",
            help="Read the replayed conversations back and compare them with the file.",
        )
        parser.add_argument(
            "--format", default="table", choices=("table", "json"), help="Default: %(default)s."
        )

    def handle(
        self,
        *,
        database: str,
        tenant: str,
        transcripts: Path | None,
        verify: bool,
        format: str,
        verbosity: int,
        **options: Any,
    ) -> None:
        if verify and transcripts is None:
            raise CommandError("--verify needs --transcripts.", returncode=2)
        self.is_silent = verbosity == 0
        self.migrate(database)
        store = Store(database, tenant=tenant)
        trips: Sequence[TripSummary] = []
        try:
            if transcripts is None:
                trips = demonstrate_agent(store, database, report=self.say)
                self.show_trips(trips, format)
            else:
                with stop_requests() as stop:
                    summary = replay_file(
                        store.sessions, transcripts, progress=self.progress, stop=stop, verify=verify
                    )
                self.show_replay(summary, format)
        except (HelixStoreError, TranscriptError) as exc:
            raise CommandError(str(exc)) from exc
        except KeyboardInterrupt as exc:
            raise CommandError("Stopped; what was committed stays, and the demo can be run again.") from exc
        self.show_server(store, trips)
        if trips:
            self.show_approval(store, trips[-1])
        if "DATABASE_URL" in os.environ:
            self.say("Run these commands with the same DATABASE_URL.")

    def migrate(self, database: str) -> None:
        executor = MigrationExecutor(connections[database])
        plan = executor.migration_plan(executor.loader.graph.leaf_nodes())
        if plan:
            self.say(f"Applying {len(plan)} migrations to {database}.")
            call_command("migrate", database=database, interactive=False, verbosity=0)

    # --- What is shown -----------------------------------------------------------------------------

    def say(self, line: str, emphasis: Emphasis = "none") -> None:
        """Write progress to stderr; none with ``-v0``."""
        styles = {
            "heading": self.style.MIGRATE_HEADING,
            "kill": self.style.ERROR,
            "success": self.style.SUCCESS,
        }
        if not self.is_silent:
            self.stderr.write(line, styles.get(emphasis, str))

    def progress(self, line: str, is_last: bool) -> None:
        """Show progress: on a terminal in one line that is overwritten, elsewhere in new lines."""
        if self.is_silent:
            return
        if self.stderr.isatty():
            self.stderr.write(f"\r\x1b[K{line}", str, ending="\n" if is_last else "")
            self.stderr.flush()
        elif is_last:
            self.say(line)

    def show_trips(self, trips: Sequence[TripSummary], format: str) -> None:
        rows = [trip.to_dict() for trip in trips]
        self.show(rows, {"sessions": rows}, format)
        killed, undisturbed, _ = trips
        if not killed.same_outcome(undisturbed):
            raise CommandError("The session of the killed workers did not end like the undisturbed one.")
        self.say("The session of the killed workers ended exactly like the undisturbed one.", "success")
        if killed.charge_count != 1:
            raise CommandError(f"The card was charged {killed.charge_count} times.")
        self.say("Its card was charged once.", "success")

    def show_replay(self, summary: ReplaySummary, format: str) -> None:
        self.show([summary.figures()], summary.to_dict(), format)
        for problem in summary.problems:
            self.stderr.write(problem, self.style.ERROR)
        if summary.problems:
            raise CommandError(f"{len(summary.problems)} conversations differ from the file.")
        if summary.stopped_at is not None:
            raise CommandError(f"Stopped after {summary.stopped_at}; the same command continues from there.")

    def show(self, rows: Sequence[dict[str, Any]], document: dict[str, Any], format: str) -> None:
        self.stdout.write(json.dumps(document, indent=2) if format == "json" else table(rows))

    def show_server(self, store: Store, trips: Sequence[TripSummary]) -> None:
        """Print how to open the pages, with a new user if that is safe."""
        self.say("Start the server:", "heading")
        self.say(f"  {server_line()}")
        self.say("Then open")
        self.say(f"  {ADDRESS}/admin/  the sessions")
        self.say(f"  {ADDRESS}/live/   an answer that is written while you read; a reload loses nothing")
        self.say(f"  {ADDRESS}/chat/   an agent that answers, and asks before it books")
        if router.db_for_read(Session) != store.alias:
            self.say(f"The admin shows the sessions of the database {router.db_for_read(Session)!r}.")
        elif trips:
            self.say("The payment that was settled, with its key and the name of who settled it:")
            self.say(f"  {ADDRESS}{effects_page(store, trips[0])}")
        if settings.DEBUG:
            self.show_login()

    def show_login(self) -> None:
        user = User.objects.filter(username=DEMO_USER).first()
        if user is None:
            user = User.objects.create_superuser(DEMO_USER, password=DEMO_USER)
        if user.is_superuser and user.check_password(DEMO_USER):
            self.say(f"Sign in as {DEMO_USER} with the password {DEMO_USER}: a superuser for this demo only.")

    def show_approval(self, store: Store, trip: TripSummary) -> None:
        options = {}
        if store.alias != router.db_for_write(Session):
            options["using"] = store.alias
        if store.tenant:
            options["tenant"] = store.tenant
        self.say("One booking waits.", "heading")
        self.say("Approve it in the admin, and the server finishes the trip. Or do both here:")
        self.say(f"  {approval_line(trip.state.session_id, **options)}")


def effects_page(store: Store, trip: TripSummary) -> str:
    """Return the address of the admin's page with the effects of a session."""
    sessions = Session.objects.using(store.alias)
    session = sessions.get(tenant=store.tenant, session_id=trip.state.session_id)
    return f"{reverse('admin:helix_store_session_change', args=[session.pk])}?section=effects"


def existing_file(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return path


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Collect Ctrl-C and SIGTERM, so that the current conversation is finished first."""
    received: list[int] = []
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda number, frame: received.append(number)) for number in signals]
    try:
        yield received
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows of text in columns with headings."""
    lines = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(value.ljust(width) for value, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
