"""``cleanup_expired_sessions``: fail sessions that have expired and delete their workspace snapshots."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser
from django.db import connections

from helix_store.cleanup.run import CleanupSummary, expired_session_cleanup_batches
from helix_store.management.base import (
    PROBLEMS_FOUND,
    USAGE,
    StoreCommand,
    at_least,
)

__all__ = ["Command"]

_LONGEST_AGE_DAYS = 100_000


class Command(StoreCommand):
    help = (
        "Mark expired sessions as failed, delete the workspace snapshots they own, and answer tool calls "
        "past their deadline with their default. Any number may run at once, and again after a stop."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--dry-run", action="store_true", help="Only count what has expired.")
        parser.add_argument(
            "--batch-size", type=at_least(1), default=200, help="Sessions per batch (default: %(default)s)."
        )
        parser.add_argument("--limit", type=at_least(1), help="Most sessions to clean up in one round.")
        parser.add_argument(
            "--delete-after",
            type=at_least(0),
            metavar="DAYS",
            help="Also delete marked sessions that expired this many days ago; their usage stays.",
        )
        parser.add_argument(
            "--loop", type=at_least(1), metavar="SECONDS", help="Repeat for ever, with this pause."
        )

    def handle(self, *args: Any, **options: Any) -> None:
        if (options["delete_after"] or 0) > _LONGEST_AGE_DAYS:
            raise CommandError(f"--delete-after is at most {_LONGEST_AGE_DAYS} days.", returncode=USAGE)
        errors = 0
        while True:
            summary = self._clean_up(options)
            errors += summary.errors
            self.write_data(summary.to_dict(), form=options["format"])
            # Before the pause: a database may drop an idle connection.
            connections[options["database"]].close_if_unusable_or_obsolete()
            if options["loop"] is None or self.stop.wait(options["loop"]):
                break
        if errors:
            raise CommandError(
                f"{errors} sessions or calls had a problem; the log of helix_store.cleanup names them.",
                returncode=PROBLEMS_FOUND,
            )

    def _clean_up(self, options: dict[str, Any]) -> CleanupSummary:
        """One round, or its batches until a signal to stop."""
        summary = CleanupSummary()
        for summary in self._batches(options):
            if self.stop.is_set():
                self.progress(f"Stopped after {summary.detected} sessions; run it again to continue.")
                break
            self.progress(
                f"{summary.detected} expired, {summary.marked} marked, {summary.errors} errors so far"
            )
        return summary

    def _batches(self, options: dict[str, Any]) -> Any:
        try:
            return expired_session_cleanup_batches(
                using=options["database"],
                page_size=options["batch_size"],
                limit=options["limit"],
                dry_run=options["dry_run"],
                delete_after=options["delete_after"],
            )
        except ImproperlyConfigured as exc:
            raise CommandError(str(exc), returncode=USAGE) from exc
