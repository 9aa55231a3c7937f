"""Gauges of the stores for Prometheus, and a health check. The extra is ``metrics``.

Both read the same figures: of each database a few statements, which use indexes and are bounded. Nothing is
counted in the process, so any number of processes serve the same figures, and a restart loses none.

Example::

    # urls.py
    from helix_store.contrib.metrics import HealthView, MetricsView, bearer_token

    may_scrape = bearer_token(os.environ["METRICS_TOKEN"])
    urlpatterns = [
        path("metrics/", MetricsView.as_view(permission=may_scrape)),
        path("health/", HealthView.as_view(permission=may_scrape)),
    ]
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.utils.crypto import constant_time_compare
from django.views.generic import View

from helix_store.core import validation
from helix_store.core.moments import as_utc
from helix_store.core.types import RunStatus
from helix_store.engine.database import Database, app_aliases
from helix_store.engine.statement import CITUS, POSTGRESQL, SQLITE, Clock, Statement, table
from helix_store.exceptions import HelixStoreError
from helix_store.models import Budget, Lock, Run, Session, Stream
from helix_store.models.sessions import NON_TERMINAL
from helix_store.reports.session import reports_of_budgets
from helix_store.stores.conditions import CONDITIONS, MOST_STUCK, find_stuck

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

__all__ = ["Figures", "HealthView", "HelixCollector", "MetricsView", "bearer_token", "read_figures"]

_logger = logging.getLogger(__name__)

MOST_COUNTED: Final = 1_000
"""The number up to which rows are counted. A gauge of 1,000 means 1,000 or more."""

MOST_BUDGETS: Final = 200
"""The number of budgets, in the order of tenants and names, that are read."""

_NEWEST_LOCKS: Final = 10_000

DEFAULT_LIMITS: Final[Mapping[str, timedelta]] = {
    "abandoned": timedelta(minutes=15),
    "unanswered": timedelta(minutes=15),
    "cleanup": timedelta(hours=6),
}
"""How old the oldest of its kind may become before `HealthView` reports a problem."""


# --- The figures of a database ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a database holds that needs attention. Ages are in seconds, and 0 if there is nothing of the kind.

    ``stuck`` holds the number of sessions by condition of `find_stuck`, ``waiting`` included, and
    ``oldest_stuck`` the age of the oldest. ``cleanup_lag`` is the age of the oldest session that has expired
    and that no cleanup has marked: if cleanups run, it stays below their interval. ``budgets`` holds the
    spent part of each limit by tenant, budget and unit; for a budget per user or agent type, that of the
    highest.

    Example::

        figures = read_figures("default")
        print(figures.stuck["crashed"], "crashed;", figures.oldest_lock, "seconds")
    """

    stuck: Mapping[str, int] = field(default_factory=dict)
    oldest_stuck: Mapping[str, float] = field(default_factory=dict)
    overdue_calls: int = 0
    running_runs: int = 0
    oldest_run: float = 0.0
    oldest_lock: float = 0.0
    active_streams: int = 0
    lost_streams: int = 0
    cleanup_lag: float = 0.0
    budgets: Mapping[tuple[str, str, str], float] = field(default_factory=dict)

    @property
    def ages(self) -> dict[str, float]:
        """The ages that the limits of `HealthView` name."""
        named = {"lock": self.oldest_lock, "run": self.oldest_run, "cleanup": self.cleanup_lag}
        return {**self.oldest_stuck, **named}


def read_figures(using: str | None = None, *, tenant: str | None = None) -> Figures:
    """Return the figures of a database, for one tenant or for all tenants.

    Runs nine statements, each bounded: one for each condition, one for the rest, and two for budgets. It runs
    more if there are over 1,000 suspended sessions and `find_stuck` reads past some of them, which ends after
    10,000 sessions of a condition. Raises `StoreUnavailable` if the database does not answer.
    """
    checked = None if tenant is None else validation.tenant(tenant)
    db = Database(using, checked or "")
    stuck: dict[str, int] = {str(condition): 0 for condition in CONDITIONS}
    oldest: dict[str, float] = {str(condition): 0.0 for condition in CONDITIONS}
    found = [
        each
        for condition in CONDITIONS
        for each in find_stuck(using=using, tenant=checked, conditions=[condition], limit=MOST_STUCK)
    ]
    ((now, runs, first_run, *locks, overdue, expired, active, lost),) = db.read(
        _counts(of_all=checked is None), {"tenant": db.tenant}
    )
    at = as_utc(now)
    for each in found:
        stuck[each.condition] += 1
        oldest[each.condition] = max(oldest[each.condition], _age(at, each.since))
    return Figures(
        stuck=stuck,
        oldest_stuck=oldest,
        overdue_calls=int(overdue),
        running_runs=int(runs),
        oldest_run=_age(at, first_run),
        oldest_lock=max(_age(at, lock) for lock in locks),
        active_streams=int(active),
        lost_streams=int(lost),
        cleanup_lag=_age(at, expired),
        budgets=dict(_spent_parts(db, checked)),
    )


def _age(now: datetime, since: Any) -> float:
    return 0.0 if since is None else max(0.0, (now - as_utc(since)).total_seconds())


@cache
def _counts(*, of_all: bool) -> Statement:
    def text(clock: Clock) -> str:
        run, session, lock, stream = map(table, (Run, Session, Lock, Stream))
        hidden = "+s.tenant" if clock is SQLITE else "s.tenant"
        of_tenant = "" if of_all else f"AND {hidden} = (SELECT %(tenant)s)"
        running = f"""{run} AS r JOIN {session} AS s ON s.id = r.session_id
                WHERE r.status = '{RunStatus.RUNNING.value}' {of_tenant} ORDER BY r.started_at, r.id
                LIMIT {MOST_COUNTED}"""
        is_open = ", ".join(f"'{status}'" for status in NON_TERMINAL)
        sessions = f"{session} AS s WHERE s.status IN ({is_open}) {of_tenant}"
        streams = f"{stream} AS s WHERE s.status = 'active' {of_tenant}"
        # A subquery is evaluated once, so an index can be read up to it.
        now = f"(SELECT {clock.now})"
        is_held = f"l.expires_at > {now}"
        of_locks = of_tenant.replace("+s.", "l.").replace("s.", "l.")
        return f"""
        SELECT {clock.now},
            (SELECT count(*) FROM (SELECT 1 FROM {running}) AS runs),
            (SELECT min(started_at) FROM (SELECT r.started_at FROM {running}) AS runs),
            (SELECT min(l.acquired_at) FROM (SELECT s.tenant, s.session_id FROM {running}) AS runs
                JOIN {lock} AS l ON l.tenant = runs.tenant AND l.name = runs.session_id AND {is_held}),
            (SELECT min(l.acquired_at) FROM (
                SELECT * FROM {lock} AS all_locks ORDER BY id DESC LIMIT {_NEWEST_LOCKS}
            ) AS l WHERE {is_held} {of_locks}),
            (SELECT count(*) FROM (SELECT 1 FROM {sessions} AND s.pending_deadline <= {now}
                LIMIT {MOST_COUNTED}) AS overdue),
            (SELECT expires_at FROM {sessions} AND s.expires_at <= {now}
                ORDER BY s.expires_at, s.id LIMIT 1),
            (SELECT count(*) FROM (SELECT 1 FROM {streams} LIMIT {MOST_COUNTED}) AS active),
            (SELECT count(*) FROM (SELECT 1 FROM {streams} AND s.lease_expires_at <= {now}
                LIMIT {MOST_COUNTED}) AS lost)"""

    return Statement(text(POSTGRESQL), text(SQLITE), citus=(text(CITUS),))


def _spent_parts(db: Database, tenant: str | None) -> Iterator[tuple[tuple[str, str, str], float]]:
    rows = Budget.objects.using(db.alias).order_by("tenant", "name")
    of_tenant = rows if tenant is None else rows.filter(tenant=tenant)
    budgets = db.query(lambda: list(of_tenant[:MOST_BUDGETS]))
    for report in reports_of_budgets(budgets, using=db.alias).values():
        for limit in report.limits:
            part = float(Decimal(limit.spent) / Decimal(limit.limit)) if limit.limit else 1.0
            yield (report.tenant, report.status.name, limit.unit), part


# --- Prometheus -------------------------------------------------------------------------------------

_GAUGES: Final[dict[str, tuple[str, Callable[[Figures], float]]]] = {
    "overdue_calls": (
        "Sessions with a call past its deadline, counted up to 1,000.",
        lambda figures: figures.overdue_calls,
    ),
    "running_runs": ("Running runs, counted up to 1,000.", lambda figures: figures.running_runs),
    "oldest_run_seconds": ("Age of the oldest running run.", lambda figures: figures.oldest_run),
    "oldest_lock_seconds": (
        "Time since the oldest held lock was acquired.",
        lambda figures: figures.oldest_lock,
    ),
    "active_streams": ("Streams with a writer, counted up to 1,000.", lambda figures: figures.active_streams),
    "lost_streams": (
        "Active streams whose writer is gone, counted up to 1,000.",
        lambda figures: figures.lost_streams,
    ),
    "cleanup_lag_seconds": (
        "Time since the oldest expired session that no cleanup has marked has expired.",
        lambda figures: figures.cleanup_lag,
    ),
}


class HelixCollector:
    """A collector for `prometheus_client`, with the label ``database`` on every gauge.

    ``using`` is a database alias; by default, it collects those of every database that the app is migrated
    to. ``tenant`` limits it to one tenant, which is then a label too. Figures are read at each scrape.

    Example::

        from prometheus_client import REGISTRY

        REGISTRY.register(HelixCollector())
    """

    def __init__(self, using: str | None = None, *, tenant: str | None = None) -> None:
        self._aliases = None if using is None else [using]
        self._tenant = None if tenant is None else validation.tenant(tenant)

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that a registry asks no database when the collector is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges. A database that does not answer has ``helix_store_up 0`` and no others."""
        from prometheus_client.core import GaugeMetricFamily

        names = ["database", *([] if self._tenant is None else ["tenant"])]

        def gauge(name: str, words: str, *labels: str) -> Any:
            return GaugeMetricFamily(f"helix_store_{name}", words, labels=[*names, *labels])

        up = gauge("up", "1 if the database has answered, otherwise 0.")
        stuck = gauge("stuck_sessions", "Sessions that cannot go on, counted up to 1,000.", "condition")
        oldest = gauge("oldest_stuck_seconds", "Age of the oldest of these sessions.", "condition")
        # The tenant of a budget is a label of its own, unless all figures are those of one tenant.
        of_budget = [*([] if self._tenant is not None else ["tenant"]), "budget", "unit"]
        spent = gauge("budget_spent_ratio", "The spent part of a limit of a budget.", *of_budget)
        others = {name: gauge(name, words) for name, (words, _value) in _GAUGES.items()}
        for alias, figures in _figures_of(self._aliases, self._tenant):
            labels = [alias, *([] if self._tenant is None else [self._tenant])]
            up.add_metric(labels, 0 if figures is None else 1)
            if figures is None:
                continue
            for condition in CONDITIONS:
                stuck.add_metric([*labels, condition], figures.stuck[condition])
                oldest.add_metric([*labels, condition], figures.oldest_stuck[condition])
            for (tenant, name, unit), part in figures.budgets.items():
                own = [name, unit] if self._tenant is not None else [tenant, name, unit]
                spent.add_metric([*labels, *own], part)
            for name, (_words, value) in _GAUGES.items():
                others[name].add_metric(labels, value(figures))
        yield from (up, stuck, oldest, spent, *others.values())


def _figures_of(aliases: list[str] | None, tenant: str | None) -> Iterator[tuple[str, Figures | None]]:
    for alias in app_aliases() if aliases is None else aliases:
        try:
            yield alias, read_figures(alias, tenant=tenant)
        except HelixStoreError:
            _logger.exception("The figures of the database %r could not be read.", alias)
            yield alias, None


# --- Views ------------------------------------------------------------------------------------------

Permission = str | Callable[[HttpRequest], bool]


def bearer_token(token: str) -> Callable[[HttpRequest], bool]:
    """Return a permission that a request has if it sends ``Authorization: Bearer`` with this token.

    Raise ``ValueError`` for an empty token, which every request could send.
    """
    if not token:
        raise ValueError("The token of bearer_token() must not be empty.")
    expected = f"Bearer {token}"

    def has_token(request: HttpRequest) -> bool:
        return constant_time_compare(request.headers.get("Authorization", ""), expected)

    return has_token


class _GuardedView(View):
    """A view of figures. ``permission`` is the name of a permission, or a function of the request."""

    http_method_names = ["get", "head", "options"]
    permission: Permission = "helix_store.view_session"
    using: str | None = None
    tenant: str | None = None

    def may_read(self, request: HttpRequest) -> bool:
        if callable(self.permission):
            return self.permission(request) is True
        user = getattr(request, "user", None)
        return bool(user is not None and user.is_active and user.has_perm(self.permission))


class MetricsView(_GuardedView):
    """The gauges in the text format of Prometheus. A request without the permission gets status 403.

    Takes the arguments of `HelixCollector` and ``permission``, by default ``helix_store.view_session``. It
    works under WSGI and ASGI. It has a registry of its own; to serve your own metrics with it, register
    `HelixCollector` in your registry instead.
    """

    def get(self, request: HttpRequest) -> HttpResponseBase:
        """Return the gauges."""
        try:
            from prometheus_client import CollectorRegistry
            from prometheus_client.exposition import choose_encoder
        except ImportError as exc:
            raise ImproperlyConfigured("MetricsView needs: pip install 'helix-store[metrics]'") from exc
        if not self.may_read(request):
            raise PermissionDenied
        registry = CollectorRegistry(auto_describe=False)
        registry.register(HelixCollector(self.using, tenant=self.tenant))
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        response = HttpResponse(encode(registry), content_type=content_type)
        response["Cache-Control"] = "no-store"
        return response


class HealthView(_GuardedView):
    """A JSON document with status 200, or 503 if a database does not answer or something is too old.

    ``limits`` maps names to ages: conditions of `find_stuck`, and ``lock``, ``run`` and ``cleanup``. By
    default, they are `DEFAULT_LIMITS`. Everybody gets the status; the figures need ``permission``.
    """

    limits: Mapping[str, timedelta] = DEFAULT_LIMITS

    def get(self, request: HttpRequest) -> HttpResponseBase:
        """Return whether everything is well, and to those who may read them, the problems and the figures."""
        unknown = set(self.limits) - Figures(oldest_stuck=dict.fromkeys(CONDITIONS, 0.0)).ages.keys()
        if unknown:
            raise ImproperlyConfigured(f"HealthView has no limit {min(unknown)!r}.")
        databases: dict[str, Any] = {}
        problems: list[str] = []
        aliases = None if self.using is None else [self.using]
        for alias, figures in _figures_of(aliases, self.tenant):
            if figures is None:
                problems.append(f"{alias}: the database does not answer")
                databases[alias] = None
                continue
            problems += (
                f"{alias}: {name} for {age:.0f} seconds, more than {limit.total_seconds():.0f}"
                for name, limit in self.limits.items()
                if (age := figures.ages[name]) > limit.total_seconds()
            )
            databases[alias] = _plain(figures)
        document: dict[str, Any] = {"status": "failing" if problems else "ok"}
        if self.may_read(request):
            document |= {"problems": problems, "databases": databases}
        response = JsonResponse(document, status=503 if problems else 200)
        response["Cache-Control"] = "no-store"
        return response


def _plain(figures: Figures) -> dict[str, Any]:
    return {
        "stuck": dict(figures.stuck),
        "overdue_calls": figures.overdue_calls,
        "running_runs": figures.running_runs,
        "active_streams": figures.active_streams,
        "lost_streams": figures.lost_streams,
        "oldest_seconds": {name: round(age, 3) for name, age in figures.ages.items()},
        "budgets": [
            {"tenant": tenant, "name": name, "unit": unit, "spent": round(part, 6)}
            for (tenant, name, unit), part in figures.budgets.items()
        ],
    }
