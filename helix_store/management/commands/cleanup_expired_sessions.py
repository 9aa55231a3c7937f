"""``cleanup_expired_sessions``: mark expired sessions as failed and delete their workspace snapshots."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db import connections

from helix_store import conf
from helix_store.cleanup import CleanupDetails, CleanupSummary, expired_session_cleanup_batches
from helix_store.cleanup.workspaces import SessionKey
from helix_store.core.types import PendingToolCall
from helix_store.management.base import StoreCommand, at_least
from helix_store.management.output import Column, age
from helix_store.sessions.tool_calls import default_answer


class Command(StoreCommand):
    help = (
        "Mark expired sessions as failed, delete the workspace snapshots they own, and answer tool calls "
        "past their deadline with their default. Also delete the expired rows of other apps, such as the "
        "memories of LangGraph. Any number of cleanups may run at once; run it again after a stop."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.epilog = "example: manage.py cleanup_expired_sessions --dry-run"
        parser.add_argument("--dry-run", action="store_true", help="Only list what is expired or overdue.")
        parser.add_argument(
            "--batch-size",
            type=at_least(1),
            help="Sessions per batch (default: PAGE_SIZE).",
        )
        parser.add_argument("--limit", type=at_least(1), help="Maximum number of sessions in one round.")
        parser.add_argument(
            "--delete-after",
            type=age,
            metavar="AGE",
            help="Also delete marked sessions that expired this long ago, such as 30d; their usage stays.",
        )
        parser.add_argument(
            "--loop", type=at_least(1), metavar="SECONDS", help="Repeat until stopped, with this pause."
        )

    def handle(self, *args: Any, **options: Any) -> None:
        with_problems = self._with_problems[options["database"]]
        not_swept = self._not_swept[options["database"]]
        details = CleanupDetails(with_problems=with_problems, not_swept=not_swept)
        summary = self._clean_up(options, details)
        self._write(summary, details, options)
        # Close the connection before the pause, because a database may drop idle ones.
        connections[options["database"]].close_if_unusable_or_obsolete()
        problems = [f"{len(with_problems)} sessions had a problem"] if with_problems else []
        problems += [f"expired rows of {record} were not deleted" for record in sorted(not_swept)]
        if problems:
            raise CommandError(f"{', '.join(problems)}; see the log of helix_store.cleanup.")

    def rounds(self, options: Mapping[str, Any]) -> Iterator[None]:
        # They are collected over all rounds, so that a session with a recurring problem counts once.
        self._with_problems: defaultdict[str, set[SessionKey]] = defaultdict(set)
        self._not_swept: defaultdict[str, set[str]] = defaultdict(set)
        yield
        while options["loop"] is not None and not self.stop.wait(options["loop"]):
            yield

    def _clean_up(self, options: dict[str, Any], details: CleanupDetails) -> CleanupSummary:
        """Run one round, or its batches until a signal stops the command."""
        summary = CleanupSummary()
        said = None
        batches = expired_session_cleanup_batches(
            using=options["database"],
            page_size=options["batch_size"] or conf.page_size(),
            limit=options["limit"],
            dry_run=options["dry_run"],
            delete_after=options["delete_after"],
            details=details,
        )
        for summary in batches:
            if self.stop.is_set():
                self.progress(f"Stopped after {summary.detected} sessions; run it again to continue.")
                break
            progress = f"{summary.detected} expired, {summary.marked} marked, {summary.errors} errors so far"
            if progress != said:
                self.progress(progress)
            said = progress
        return summary

    def _write(self, summary: CleanupSummary, details: CleanupDetails, options: dict[str, Any]) -> None:
        data = summary.to_dict()
        if not options["dry_run"]:
            self.write_data(data)
            return
        sessions = [{"tenant": key.tenant, "session_id": key.session_id} for key in details.expired]
        calls = [_overdue(key, call) for key, call in details.overdue]
        if self.is_json:
            self.write_data({**data, "expired_sessions": sessions, "overdue_calls": calls})
            return
        for heading, rows in (("expired sessions", sessions), ("overdue calls", calls)):
            if rows:
                columns = [Column(name.replace("_", " "), itemgetter(name), cut="middle") for name in rows[0]]
                self.write_text(f"{heading}:")
                self.write_table(columns, rows)
                self.write_text("\n")
        self.write_data(data)


def _overdue(key: SessionKey, call: PendingToolCall) -> dict[str, Any]:
    return {
        "tenant": key.tenant,
        "session_id": key.session_id,
        "tool_call_id": call.tool_call_id,
        "tool_name": call.tool_name,
        "deadline": call.deadline,
        "has_default": default_answer(call) is not None,
    }
