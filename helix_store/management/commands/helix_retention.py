"""``helix_retention``: apply the retention policy of the settings."""

from __future__ import annotations

from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser

from helix_store import conf
from helix_store.cleanup.retention import Retention, RetentionSummary
from helix_store.management.base import PROBLEMS_FOUND, USAGE, StoreCommand, at_least
from helix_store.management.output import Column, pairs, table

__all__ = ["Command"]

_RULES: Final = {
    "sessions": "delete idle sessions",
    "checkpoints": "delete checkpoints",
    "streams": "prune streams",
    "usage_dropped": "delete usage",
    "usage_anonymised": "anonymise usage",
}
_COUNTS: Final = ("trees", "in_use", "snapshots_deleted", "streams_failed", "errors")


class Command(StoreCommand):
    help = (
        'Apply HELIX_STORE["RETENTION"]: delete idle sessions, old checkpoints, chunks of ended streams and '
        "old usage. Sessions in use are left alone. Safe to repeat, and to stop at any time."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        self.add_tenant_argument(parser)
        parser.add_argument("--dry-run", action="store_true", help="Only count what a run would do.")
        parser.add_argument(
            "--batch-size",
            type=at_least(1),
            help="Sessions per batch (default: PAGE_SIZE).",
        )
        parser.epilog = "example: manage.py helix_retention --dry-run"

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            retention = Retention(
                using=options["database"],
                tenant=options["tenant"],
                page_size=options["batch_size"],
                dry_run=options["dry_run"],
            )
        except ImproperlyConfigured as exc:
            raise CommandError(str(exc), returncode=USAGE) from exc
        if conf.retention().keeps_everything:
            self.progress('HELIX_STORE["RETENTION"] has no rule: everything is kept.')
        is_stopped = self._apply(retention)
        self._write(retention.summary, form=options["format"])
        if is_stopped:
            trees = retention.summary.trees
            self.progress(
                f"Stopped between two batches, after {trees} session trees; run it again to continue."
            )
        if retention.summary.errors:
            raise CommandError(
                f"{retention.summary.errors} sessions or tenants had a problem and were left unchanged; see "
                "the log of helix_store.cleanup.",
                returncode=PROBLEMS_FOUND,
            )

    def _apply(self, retention: Retention) -> bool:
        """Apply the policy, and return whether a signal stopped it."""
        with self.progress_bar("rows") as progress:
            for summary in retention.batches():
                progress.update(sum(sum(getattr(summary, rule).values()) for rule in _RULES))
                if self.stop.is_set():
                    return True
        return False

    def _write(self, summary: RetentionSummary, *, form: str) -> None:
        if form == "json":
            self.write_data(summary.to_dict(), form=form)
            return
        rows = [
            (text, name, f"{count:,}")
            for rule, text in _RULES.items()
            for name, count in getattr(summary, rule).items()
        ]
        heading = "rows that would change" if summary.dry_run else "rows"
        columns = [Column(heading="rule"), Column(heading="table"), Column(heading=heading, right=True)]
        if rows:
            self.write_text(f"{table(columns, rows, width=self.width, colours=self.colours)}\n\n")
        counts = ((name.replace("_", " "), getattr(summary, name)) for name in _COUNTS)
        self.write_text(pairs(counts, width=self.width, colours=self.colours))
