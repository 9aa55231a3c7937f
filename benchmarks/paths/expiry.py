"""The sweep of expired sessions in batches of 1,000, against one UPDATE of them all."""

from __future__ import annotations

from django.db import connections

from benchmarks.evidence import Evidence
from benchmarks.figures import Target
from benchmarks.large import large_database
from benchmarks.operations import Operation
from benchmarks.races import Client, Comparison, Race
from helix_store.cleanup import expired_session_cleanup
from helix_store.core.types import SESSION_EXPIRED
from helix_store.models import Session

__all__ = ["CASES"]

BATCH = 1_000
_TABLE = f'"{Session._meta.db_table}"'


class Sweep(Operation):
    """As many sessions expire before a round as it sweeps."""

    def __init__(self, worker: int) -> None:
        self.expired = 0

    def prepare(self, count: int) -> None:
        with connections["large"].cursor() as cursor:
            cursor.execute(
                f"""
                UPDATE {_TABLE} SET status = 'active', failure_reason = NULL, expires_at = NULL
                WHERE expires_at IS NOT NULL"""
            )
            cursor.execute(
                f"""
                UPDATE {_TABLE} SET status = 'active', expires_at = now() - random() * interval '1 day'
                WHERE id IN (SELECT id FROM {_TABLE} WHERE session_id LIKE 'many-%%' ORDER BY id LIMIT %s)""",
                [count],
            )
            self.expired = cursor.rowcount
            assert self.expired == count
            cursor.execute(f"VACUUM {_TABLE}")

    def run(self, count: int) -> None:
        summary = expired_session_cleanup(using="large", page_size=BATCH)
        assert (summary.marked, summary.errors) == (count, 0), summary

    def check(self) -> None:
        left = Session.objects.using("large").non_terminal().filter(expires_at__isnull=False)
        assert not left.exists()


class OneUpdate(Sweep):
    def run(self, count: int) -> None:
        with connections["large"].cursor() as cursor:
            cursor.execute(
                f"""
                UPDATE {_TABLE}
                SET status = 'failed', failure_reason = %s, version = version + 1, updated_at = now()
                WHERE status IN ('active', 'running', 'paused', 'interrupted') AND expires_at <= now()""",
                [SESSION_EXPIRED],
            )
            assert cursor.rowcount == count, cursor.rowcount


_MARKED = Evidence(f"SELECT count(*) FROM {_TABLE} WHERE failure_reason = '{SESSION_EXPIRED}'", (1,), "large")

CASES = [
    Race(
        contestants={
            "sweep": Client(operation=Sweep, evidence=_MARKED),
            "one UPDATE": Client(operation=OneUpdate, evidence=_MARKED),
        },
        comparisons=[
            Comparison(
                path="expiry sweep in batches of 1,000, against one UPDATE",
                of="sweep",
                to="one UPDATE",
                target=Target(0.40, 0.65),
            )
        ],
        needs=[large_database],
        aliases=("large",),
        # As many for the one as for the other: an UPDATE of everything has to be of everything.
        bounds=lambda scale: (scale.expired, scale.expired),
    )
]
