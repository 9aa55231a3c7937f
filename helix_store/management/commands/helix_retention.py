"""``helix_retention``: apply the retention policy of the settings."""

from __future__ import annotations

from typing import Any, Final

from django.core.management.base import CommandError, CommandParser

from helix_store import conf
from helix_store.cleanup.retention import Retention, RetentionSummary
from helix_store.management.base import StoreCommand, at_least
from helix_store.management.output import Column

_RULES: Final = {
    "sessions": "delete idle sessions",
    "checkpoints": "delete checkpoints",
    "streams": "prune streams",
    "usage_dropped": "delete usage",
    "usage_anonymised": "anonymise usage",
    "budget_periods": "delete counters of budgets",
    "operations": "delete records of operations",
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
        retention = Retention(
            using=options["database"],
            tenant=options["tenant"],
            page_size=options["batch_size"],
            dry_run=options["dry_run"],
        )
        if conf.retention().keeps_everything:
            self.progress('HELIX_STORE["RETENTION"] has no rule: everything is kept.')
        self.look_for_tenant(options)
        self.run_batches(retention.batches(), retention.summary, unit="rows", done=_row_count)
        self._write(retention.summary)
        if self.stop.is_set():
            trees = retention.summary.trees
            self.progress(
                f"Stopped between two batches, after {trees} session trees; run it again to continue."
            )
        if retention.summary.errors:
            raise CommandError(
                f"{retention.summary.errors} sessions or tenants had a problem and were left unchanged; see "
                "the log of helix_store.cleanup."
            )

    def _write(self, summary: RetentionSummary) -> None:
        if self.is_json:
            self.write_data(summary.to_dict())
            return
        rows = [
            (text, name, f"{count:,}")
            for rule, text in _RULES.items()
            for name, count in getattr(summary, rule).items()
        ]
        heading = "rows that would change" if summary.dry_run else "rows"
        if rows:
            self.write_table((Column("rule"), Column("table"), Column(heading, right=True)), rows)
            self.write_text("\n")
        self.write_data({name: getattr(summary, name) for name in _COUNTS})


def _row_count(summary: RetentionSummary) -> int:
    return sum(sum(getattr(summary, rule).values()) for rule in _RULES)
