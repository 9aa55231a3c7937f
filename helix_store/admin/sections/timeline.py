"""The timeline of a session: what happened in its runs, on one axis."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from typing import Any, Final

from django.db.models import Count, Q, Subquery
from django.utils.translation import gettext, pgettext
from django.utils.translation import gettext_lazy as _

from helix_store.actions.answers import People
from helix_store.admin.elements import (
    NOTHING,
    difference,
    distance,
    duration,
    format_time,
    grouped,
    identifier,
    link,
    money,
    name_of_status,
    one_line,
    printable,
    reason_words,
    stamp,
    tone,
)
from helix_store.admin.sections.conversation import messages_as_blocks
from helix_store.admin.sections.section import Section, SessionView
from helix_store.admin.sections.waits import with_held
from helix_store.core import moments
from helix_store.core.types import SUSPENDED_STATUSES, RunStatus, UsageKind
from helix_store.core.usage import cost_from_units
from helix_store.engine.expressions import ExactSum
from helix_store.exceptions import HelixStoreError
from helix_store.models import (
    Checkpoint,
    Decision,
    DecisionOutcome,
    Effect,
    EffectState,
    Lock,
    Message,
    Post,
    Run,
    Session,
    SubSessionRef,
    UsageEntry,
)
from helix_store.models.sessions import PostState
from helix_store.reports.payloads import changes_between, said_by, start_of
from helix_store.sessions.runs import with_abandoned
from helix_store.sessions.state import SUPERSEDED

_RUNS: Final = 12
_STEPS: Final = 60
_STEPS_AFTER: Final = 20
"""The number of steps that are shown after the one that the URL names."""

_STEPS_WITH_CALLS: Final = 20
_ENTRIES: Final = 400
_EFFECTS: Final = 60
_POSTS: Final = 40
_DECISIONS: Final = 40
_SUB_AGENTS: Final = 30
_FAILURES: Final = 50
_TREE: Final = 200
_REASON: Final = 120
_WIDTH: Final = 1000
_GAP: Final = 40
"""The width of a shortened idle time, in units of the axis."""

_LONGEST_CALL: Final = 366 * 86_400_000
"""The longest duration of a call that is shown, in milliseconds."""

_LEAST_WIDTH: Final = 4.0
_TICKS: Final = 4
_LARGEST_STATE: Final = 1_000_000
"""The maximum number of bytes of a state whose changes are shown."""

_CALLS: Final = (UsageKind.TOKENS, UsageKind.TOOL, UsageKind.SUBAGENT)

Span = tuple[datetime, datetime]


class Scale:
    """A map from times to positions on an axis of 1000 units.

    An idle time that is longer than the work around it is shortened.
    """

    def __init__(self, busy: Sequence[Span]) -> None:
        merged = _merged(busy)
        worked = sum((end - start for start, end in merged), timedelta())
        idle = [(end, start) for (_s, end), (start, _e) in pairwise(merged)]
        self.gaps = [gap for gap in idle if gap[1] - gap[0] > worked / 4]
        room = max(_WIDTH - _GAP * len(self.gaps), _WIDTH // 4)
        self._gap = (_WIDTH - room) / len(self.gaps) if self.gaps else 0.0
        self.start, self.end = merged[0][0], merged[-1][1]
        cut = sum((end - start for start, end in self.gaps), timedelta())
        self._unit = room / max((self.end - self.start - cut).total_seconds(), 0.001)

    def position(self, at: datetime) -> float:
        at = min(max(at, self.start), self.end)
        shown, skipped = at - self.start, 0.0
        for start, end in self.gaps:
            if at <= start:
                break
            inside = min(at, end) - start
            shown -= inside
            skipped += self._gap * (inside / (end - start))
        return shown.total_seconds() * self._unit + skipped

    def span(self, start: datetime, end: datetime) -> dict[str, str]:
        """Return the position of a bar as strings: a template would format numbers in the user's language."""
        x = self.position(start)
        # A short bar must stay visible, even at the end of the axis.
        width = max(self.position(end) - x, _LEAST_WIDTH)
        return {"x": f"{min(x, _WIDTH - width):.1f}", "width": f"{width:.1f}"}

    def ticks(self) -> list[str]:
        """Return how long after the start the first, second, … part of the axis begins."""
        return [duration(self._moment(_WIDTH * each / _TICKS) - self.start) for each in range(_TICKS)]

    def _moment(self, position: float) -> datetime:
        low, high = self.start, self.end
        for _each in range(40):
            middle = low + (high - low) / 2
            low, high = (middle, high) if self.position(middle) < position else (low, middle)
        return high if position else self.start


def _merged(spans: Sequence[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, max(start, end)))
    return merged


@dataclass(kw_only=True, slots=True)
class Spent:
    """What something has spent, and how many of its calls have failed."""

    tokens: int = 0
    cost: Decimal = Decimal(0)
    failed: int = 0

    def add(self, entry: dict[str, Any]) -> None:
        self.tokens += entry["total_tokens"] or 0
        self.cost += entry["cost_usd"] or 0
        self.failed += entry["success"] is False

    def __str__(self) -> str:
        tokens = gettext("%(count)s tokens") % {"count": grouped(self.tokens)} if self.tokens else ""
        return " · ".join(filter(None, (tokens, money(self.cost) if self.cost else "")))


@dataclass(kw_only=True, slots=True)
class Lane:
    """A row of the timeline. ``gone`` is the last sign of life of a worker that did not end its run."""

    kind: str
    label: Any
    start: datetime
    end: datetime
    tone: str = "plain"
    note: Any = ""
    url: str = ""
    anchor: str = ""
    spent: Spent = field(default_factory=Spent)
    failed: str = ""
    gone: datetime | None = None
    is_known: bool = True
    is_longest: bool = False
    """True if the beginning is not stored: the duration is then the longest that it can have been."""
    opened: dict[str, Any] | None = None

    def drawn(self, scale: Scale) -> dict[str, Any]:
        took = duration(self.end - self.start) if self.is_known else NOTHING
        if self.kind in ("post", "decision"):
            took = ""
        end = self.end if self.gone is None else max(self.gone, self.start)
        return {
            "kind": self.kind,
            "label": printable(str(self.label)),
            "tone": self.tone,
            "note": self.note,
            "url": self.url,
            "anchor": self.anchor,
            "spent": str(self.spent),
            "failed": self.failed,
            "took": f"≤ {took}" if self.is_longest and self.is_known else took,
            "title": f"{format_time(self.start)} … {format_time(self.end)}",
            "gone": None if self.gone is None else scale.span(end, self.end),
            "opened": self.opened,
            **scale.span(self.start, end),
        }


@dataclass(kw_only=True)
class Shown:
    """The rows of a page of the timeline."""

    runs: list[dict[str, Any]]
    following: dict[str, Any] | None
    """The run after the newest shown one."""
    steps: list[dict[str, Any]]
    entries: list[dict[str, Any]] = field(default_factory=list)
    spent: dict[str, Spent] = field(default_factory=dict)
    effects: list[Any] = field(default_factory=list)
    posts: list[dict[str, Any]] = field(default_factory=list)
    refs: list[dict[str, Any]] = field(default_factory=list)
    decisions: list[dict[str, Any]] = field(default_factory=list)
    lock: dict[str, Any] | None = None
    now: datetime
    is_one: bool = False
    """True if the URL names a run, or a step."""
    until: int | None = None
    """The number of the last step that the page may show."""
    has_older_steps: bool = False
    has_older_runs: bool = False

    @property
    def run_ids(self) -> list[str]:
        return [run["run_id"] for run in self.runs]

    def end_of(self, run: dict[str, Any]) -> datetime:
        end: datetime = run["ended_at"] or self.now
        return end

    def worker_of(self, run: dict[str, Any] | None) -> str:
        """Return who drives a run. Only the newest holder of the lock is stored."""
        if run is None or self.lock is None or run["fencing_token"] != self.lock["token"]:
            return ""
        return one_line(self.lock["owner"] or "", _REASON)


class Timeline(Section):
    """Runs with their steps, and in each step the model's answers, tools and effects.

    Without parameters it shows the newest runs, and of those the newest steps. ``?run=`` shows one run,
    ``?step=`` the run of one step, with what the step has stored, and ``?until=`` earlier steps.
    """

    name = "timeline"
    label = _("Timeline")
    needs = (Run,)

    def context(self, view: SessionView) -> dict[str, Any]:
        opened = _step_with_number(view)
        shown = _shown(view, opened)
        context = {
            "list_url": view.list_url(Run),
            "failures": _failures(view)
            if "failed" in view.request.GET and view.may_view(UsageEntry)
            else None,
            "missing_step": view.number("step") if opened is None and view.may_view(Checkpoint) else None,
            "may_jump": view.may_view(Checkpoint) and view.session.step_count > 0,
        }
        if not shown.runs:
            return {**context, "rows": []}
        lanes = list(_lanes(view, shown, opened))
        # The time that a session waits is not busy, except for its end.
        busy = [(lane.start, lane.end) for lane in lanes if lane.kind != "wait"]
        scale = Scale([*busy, (lanes[-1].end, lanes[-1].end)])
        return {
            **context,
            **_pages(view, shown),
            "rows": [lane.drawn(scale) for lane in lanes],
            "gaps": [scale.span(start, end) for start, end in scale.gaps],
            "starts": stamp(scale.start),
            "ends": stamp(scale.end),
            "ticks": scale.ticks(),
        }


# --- What is read


_RUN_COLUMNS: Final = (
    "pk",
    "run_id",
    "turn",
    "status",
    "step_count",
    "build",
    "started_at",
    "ended_at",
    "fencing_token",
    "is_abandoned",
)
_STEP_COLUMNS: Final = (
    *("pk", "run_id", "step_id", "step_count", "created_at", "version"),
    *("message_count", "checkpoint_id", "size_bytes"),
)
_EFFECT_COLUMNS: Final = (
    *("effect_id", "tool_name", "state", "run_id", "step_count"),
    *("attempt", "started_at", "ended_at"),
)
_POST_COLUMNS: Final = ("author", "received_at")
_REF_COLUMNS: Final = ("sub_session_id", "agent_type", "status", "created_at", "updated_at")
_DECISION_COLUMNS: Final = ("tool_call_id", "outcome", "is_final", "actor", "decided_at")
_LOCK_COLUMNS: Final = ("token", "owner")


def _step_with_number(view: SessionView) -> dict[str, Any] | None:
    """Return the step that the URL names, or ``None`` if there is none."""
    number = view.number("step")
    if number is None or not view.may_view(Checkpoint):
        return None
    return view.steps.filter(step_count=number).order_by("-version").values(*_STEP_COLUMNS).first()


def _shown(view: SessionView, opened: dict[str, Any] | None) -> Shown:
    """Read the rows of a page: a bounded number of each kind, with one statement for each."""
    shown = _runs(view, opened)
    if not shown.runs:
        return shown
    if view.may_view(Checkpoint):
        _read_steps(view, shown, opened)
    if view.may_view(UsageEntry):
        _read_usage(view, shown)
    since, until = _range(shown)
    if view.may_view(Effect):
        effects = with_held(view.rows(Effect)).filter(run_id__in=shown.run_ids).order_by("-sequence")
        shown.effects = list(effects.values(*_EFFECT_COLUMNS, "is_held")[:_EFFECTS])[::-1]
    if view.may_view(Post):
        posts = view.rows(Post).filter(state=PostState.RECEIVED, received_at__range=(since, until))
        shown.posts = list(posts.order_by("-sequence").values(*_POST_COLUMNS)[:_POSTS])[::-1]
    if view.may_view(SubSessionRef):
        refs = view.rows(SubSessionRef).filter(created_at__range=(since, until))
        shown.refs = list(refs.order_by("-pk").values(*_REF_COLUMNS)[:_SUB_AGENTS])[::-1]
    if view.may_view(Decision):
        decisions = view.rows(Decision).filter(decided_at__range=(since, until)).order_by("-version")
        shown.decisions = list(decisions.values(*_DECISION_COLUMNS)[:_DECISIONS])[::-1]
    if view.may_view(Lock):
        lock = Lock.objects.using(view.alias).filter(tenant=view.session.tenant, name=view.session.session_id)
        holder = lock.values_list(*_LOCK_COLUMNS).first()
        shown.lock = None if holder is None else dict(zip(_LOCK_COLUMNS, holder, strict=True))
    return shown


def _runs(view: SessionView, opened: dict[str, Any] | None) -> Shown:
    """Return the run that the URL names, or the newest ones, each in order, with the run after them."""
    runs, now = with_abandoned(view.rows(Run)), moments.now()
    texts = {"reason": start_of("completion_reason", _REASON), "error_start": start_of("error", _REASON)}
    turn = view.number("run")
    if opened is not None:
        of_step = runs.filter(run_id=opened["run_id"]).values("turn")[:1]
        found = list(
            runs.filter(turn__gte=Subquery(of_step)).order_by("turn").values(*_RUN_COLUMNS, **texts)[:2]
        )
    elif turn is not None:
        found = list(runs.filter(turn__gte=turn).order_by("turn").values(*_RUN_COLUMNS, **texts)[:2])
    if (opened is not None or turn is not None) and found:
        return Shown(
            runs=found[:1], following=found[1] if len(found) > 1 else None, steps=[], now=now, is_one=True
        )
    before = view.number("before")
    if before is not None:
        runs = runs.filter(turn__lte=before)
    found = list(runs.order_by("-turn").values(*_RUN_COLUMNS, **texts)[: _RUNS + 2])
    following = found.pop(0) if len(found) > 1 and found[0]["turn"] == before else None
    shown = Shown(runs=found[:_RUNS][::-1], following=following, steps=[], now=now)
    shown.has_older_runs = len(found) > _RUNS
    return shown


def _read_steps(view: SessionView, shown: Shown, opened: dict[str, Any] | None) -> None:
    """Read the newest steps of the runs, or those around the step that the URL names."""
    steps = view.steps.filter(run_id__in=shown.run_ids)
    until = view.number("until")
    if opened is not None:
        until = opened["step_count"] + _STEPS_AFTER
    if until is not None:
        steps = steps.filter(step_count__lte=until)
    # One more shows where the first one began.
    found = list(steps.order_by("-version").values(*_STEP_COLUMNS)[: _STEPS + 1])[::-1]
    shown.has_older_steps = len(found) > _STEPS
    shown.steps = found[-_STEPS:]
    shown.until = until
    if not shown.steps:
        return
    before = found[0] if shown.has_older_steps else _step_before(view, shown.steps[0])
    _set_starts(shown.steps, before, shown.runs)


def _step_before(view: SessionView, step: dict[str, Any]) -> dict[str, Any] | None:
    earlier = view.steps.filter(version__lt=step["version"]).order_by("-version")
    return earlier.values(*_STEP_COLUMNS).first()


def _set_starts(
    steps: list[dict[str, Any]], before: dict[str, Any] | None, runs: Iterable[dict[str, Any]]
) -> None:
    """Set when each step began: when the previous step of its run ended, or when its run began.

    It is ``None`` if the previous step was deleted.
    """
    run_starts = {run["run_id"]: run["started_at"] for run in runs}
    for step in steps:
        if before is not None and before["run_id"] == step["run_id"]:
            step["started_at"] = before["created_at"]
        elif before is None and step["step_count"] > 1:
            step["started_at"] = None
        else:
            step["started_at"] = run_starts[step["run_id"]]
        step["before"] = before
        before = step


def _read_usage(view: SessionView, shown: Shown) -> None:
    """Read the entries of the shown steps, and the sums of the runs."""
    entries = view.rows(UsageEntry).filter(run_id__in=shown.run_ids, kind__in=[each.value for each in _CALLS])
    of_steps = entries
    if shown.steps and shown.has_older_steps:
        of_steps = of_steps.filter(step_count__gte=shown.steps[0]["step_count"])
    if shown.until is not None:
        of_steps = of_steps.filter(step_count__lte=shown.until)
    columns = ("kind", "timestamp", "duration_ms", "success", "tool_name", "agent_type", "model", "run_id")
    sums = ("sub_session_id", "step_count", "total_tokens", "cost_usd")
    newest = of_steps.order_by("-timestamp", "-pk").values(*columns, *sums)
    shown.entries = list(newest[:_ENTRIES])[::-1]
    by_run = (
        entries.order_by()
        .values("run_id")
        .annotate(
            tokens=ExactSum("total_tokens"),
            cost=ExactSum("cost_usd"),
            failures=Count("pk", filter=Q(success=False)),
        )
    )
    for row in by_run:
        cost = cost_from_units(row["cost"])
        shown.spent[row["run_id"]] = Spent(tokens=row["tokens"], cost=cost, failed=row["failures"])


def _range(shown: Shown) -> Span:
    """Return the time that the page covers: from the first to the run after the last, or to now."""
    first = shown.runs[0]["started_at"]
    if shown.is_one and shown.steps and shown.has_older_steps:
        first = shown.steps[0]["started_at"] or first
    if shown.following is not None:
        return first, shown.following["started_at"]
    return first, shown.now


# --- What is drawn


def _lanes(view: SessionView, shown: Shown, opened: dict[str, Any] | None) -> Iterator[Lane]:
    people = People.of_actors(row["actor"] for row in shown.decisions)
    urls = view.session_urls(ref["sub_session_id"] for ref in shown.refs)
    followers = [*shown.runs[1:], shown.following]
    first, _last = _range(shown)
    for run, following in zip(shown.runs, followers, strict=True):
        end = shown.end_of(run)
        next_start = shown.now if following is None else following["started_at"]
        inner = sorted(_inside(view, shown, run, opened), key=lambda group: group[0].end)
        lanes = [lane for group in inner for lane in group]
        yield _run_lane(view, shown, run, following, lanes, start=max(run["started_at"], first))
        yield from lanes
        for ref in shown.refs:
            if run["started_at"] <= ref["created_at"] < next_start:
                yield _sub_agent(ref, urls, shown.now)
        if not _waits(run):
            continue
        note = gettext("still waits") if following is None else ""
        yield Lane(kind="wait", label=_("Wait"), start=end, end=next_start, tone="waiting", note=note)
        # The time of a decision is stored in whole milliseconds.
        asked = end.replace(microsecond=end.microsecond // 1000 * 1000)
        for row in shown.decisions:
            if asked <= row["decided_at"] <= next_start:
                yield _decision(view, row, people)


def _run_lane(
    view: SessionView,
    shown: Shown,
    run: dict[str, Any],
    following: dict[str, Any] | None,
    lanes: list[Lane],
    *,
    start: datetime,
) -> Lane:
    spent = shown.spent.get(run["run_id"], Spent())
    is_superseded, is_gone = run["reason"] == SUPERSEDED, run["is_abandoned"]
    gone = None
    if is_superseded or is_gone:
        seen = [lane.end for lane in lanes if lane.end < shown.end_of(run)]
        gone = max(seen, default=start if lanes or not run["step_count"] else None)
    return Lane(
        kind="run",
        label=pgettext("of a turn", "Run %d") % run["turn"],
        start=start,
        end=shown.end_of(run),
        tone="bad" if is_superseded or is_gone else tone(run["status"]),
        note=" · ".join(filter(None, _notes_on(shown, run, following))),
        url=view.page.page_url(Run, run["pk"]) if shown.is_one else view.url(run=run["turn"]),
        spent=spent,
        failed=_failed_words(spent.failed),
        gone=gone,
    )


def _notes_on(shown: Shown, run: dict[str, Any], following: dict[str, Any] | None) -> Iterator[str]:
    """Yield the build of a run, how the run has ended, and why."""
    if run["build"]:
        yield gettext("build %(build)s") % {"build": printable(run["build"])}
    worker = shown.worker_of(run)
    if run["reason"] == SUPERSEDED:
        yield gettext("its worker was gone")
        if following is not None:
            by = shown.worker_of(following)
            words = (
                gettext("taken over by run %(turn)d (%(worker)s)")
                if by
                else gettext("taken over by run %(turn)d")
            )
            yield words % {"turn": following["turn"], "worker": by}
        return
    if run["is_abandoned"]:
        yield gettext("its worker is gone, and nobody has taken over")
        return
    yield printable(name_of_status(run["status"]))
    yield one_line(said_by(run["error_start"]), _REASON) or reason_words(run["reason"])
    if run["status"] == RunStatus.RUNNING:
        yield worker


def _failed_words(count: int) -> str:
    return gettext("%(count)s failed") % {"count": grouped(count)} if count else ""


def _inside(
    view: SessionView, shown: Shown, run: dict[str, Any], opened: dict[str, Any] | None
) -> Iterator[list[Lane]]:
    """Yield the steps of a run, each with what happened in it, and what happened outside of its steps."""
    run_id = run["run_id"]
    known = {ref["sub_session_id"] for ref in shown.refs}  # They have lanes of their own.
    entries: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for entry in shown.entries:
        if entry["run_id"] == run_id and entry["sub_session_id"] not in known:
            entries[entry["step_count"]].append(entry)
    effects: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for effect in shown.effects:
        if effect["run_id"] == run_id:
            effects[effect["step_count"] or 0].append(effect)
    has_calls = shown.is_one or len(shown.steps) <= _STEPS_WITH_CALLS
    last_end = run["started_at"]
    for step in shown.steps:
        if step["run_id"] == run_id:
            number = step["step_count"]
            lanes = _step(view, run["turn"], step, entries.pop(number, []), effects.pop(number, []), opened)
            # With many steps, the calls are on the page of their run, except for those that have failed.
            yield [lane for lane in lanes if has_calls or lane.kind == "step" or lane.failed]
            last_end = step["created_at"]
    if shown.steps and shown.has_older_steps and not shown.is_one and run_id != shown.steps[0]["run_id"]:
        first = shown.steps[0]
        if run["started_at"] < first["created_at"] and last_end == run["started_at"]:
            return  # Its steps are not on the page.
    for number in sorted({*entries, *effects}):
        yield _not_committed(
            view, run, shown, number, entries.get(number, []), effects.get(number, []), last_end
        )
    for post in shown.posts:
        if run["started_at"] <= post["received_at"] <= shown.end_of(run):
            yield [_post(view, post)]


def _step(
    view: SessionView,
    turn: int,
    step: dict[str, Any],
    entries: list[dict[str, Any]],
    effects: list[dict[str, Any]],
    opened: dict[str, Any] | None,
) -> list[Lane]:
    number, end = step["step_count"], step["created_at"]
    start = end if step["started_at"] is None else min(step["started_at"], end)
    is_opened = opened is not None and opened["pk"] == step["pk"]
    spent = _sum_of(entries)
    # Without its parameters, the link of an opened step closes it.
    url = view.url(run=turn, until=number + _STEPS_AFTER) if is_opened else view.url(step=number)
    own = Lane(
        kind="step",
        label=_("Step %d") % number,
        start=start,
        end=end,
        note=printable(step["step_id"] or ""),
        url=f"{url}#step-{number}",
        anchor=f"step-{number}",
        spent=spent,
        failed=_failed_words(spent.failed),
        is_known=step["started_at"] is not None,
        opened=_opened(view, step, spent) if is_opened else None,
    )
    return [own, *_calls(view, entries, effects, start)]


def _not_committed(
    view: SessionView,
    run: dict[str, Any],
    shown: Shown,
    number: int,
    entries: list[dict[str, Any]],
    effects: list[dict[str, Any]],
    start: datetime,
) -> list[Lane]:
    """Return a step that has called a model or a tool, and is not stored: its worker died, or is at it."""
    calls = list(_calls(view, entries, effects, start))
    spent = _sum_of(entries)
    is_running = run["status"] == RunStatus.RUNNING and not run["is_abandoned"]
    end = shown.now if is_running else max(start, *(call.end for call in calls))
    own = Lane(
        kind="step",
        label=_("Step %d") % number,
        start=min(start, *(call.start for call in calls)),
        end=end,
        tone="info" if is_running else "bad",
        note=gettext("not committed yet") if is_running else gettext("never committed"),
        spent=spent,
        failed=_failed_words(spent.failed),
    )
    return [own, *calls]


def _sum_of(entries: Iterable[dict[str, Any]]) -> Spent:
    spent = Spent()
    for entry in entries:
        spent.add(entry)
    return spent


def _calls(
    view: SessionView, entries: Sequence[dict[str, Any]], effects: Sequence[dict[str, Any]], start: datetime
) -> Iterator[Lane]:
    """Yield the calls of a step in the order in which they began."""
    lanes = [_effect(view, effect) for effect in effects]
    before = start
    for entry in entries:
        lanes.append(_call(entry, before))
        before = max(before, entry["timestamp"])
    yield from sorted(lanes, key=lambda lane: lane.start)


def _call(entry: dict[str, Any], before: datetime) -> Lane:
    """Return the lane of a usage entry, which is recorded when its call has ended.

    Without a duration, a model's answer cannot have begun earlier than the entry before it.
    """
    end, length, spent = entry["timestamp"], entry["duration_ms"], Spent()
    start = end - timedelta(milliseconds=min(length or 0, _LONGEST_CALL))
    spent.add(entry)
    if entry["kind"] == UsageKind.TOKENS:
        name = printable(entry["model"] or NOTHING)
        return Lane(
            kind="model",
            label=name,
            start=min(before, end) if length is None else start,
            end=end,
            tone="info",
            note=_("model"),
            spent=spent,
            is_longest=length is None,
        )
    is_tool = entry["kind"] == UsageKind.TOOL
    has_failed = entry["success"] is False
    return Lane(
        kind="tool" if is_tool else "sub-agent",
        label=printable((entry["tool_name"] if is_tool else entry["agent_type"]) or NOTHING),
        start=start,
        end=end,
        tone="bad" if has_failed else "good",
        note=gettext("tool") if is_tool else gettext("sub-agent"),
        failed=gettext("failed") if has_failed else "",
        is_known=length is not None,
    )


def _effect(view: SessionView, effect: dict[str, Any]) -> Lane:
    state, is_lost = effect["state"], effect["state"] == EffectState.STARTED and not effect["is_held"]
    if is_lost:
        state = EffectState.UNKNOWN
    words = dict(EffectState.choices).get(state, state)
    note = f"{gettext('effect')} · {words}"
    if effect["attempt"] > 1:
        note += " · " + gettext("attempt %(number)d") % {"number": effect["attempt"]}
    return Lane(
        kind="effect",
        label=printable(effect["tool_name"] or effect["effect_id"]),
        start=effect["started_at"],
        end=max(effect["started_at"], effect["ended_at"] or effect["started_at"]),
        tone=_TONES_OF_EFFECTS.get(state, "plain"),
        note=note,
        url=f"{view.url('effects')}#section",
        is_known=effect["ended_at"] is not None,
    )


_TONES_OF_EFFECTS: Final[dict[str, str]] = {
    EffectState.DONE: "good",
    EffectState.UNKNOWN: "bad",
    EffectState.STARTED: "info",
}


def _post(view: SessionView, post: dict[str, Any]) -> Lane:
    at = post["received_at"]
    author = one_line(post["author"] or "", _REASON)
    note = gettext("from %(author)s") % {"author": author} if author else ""
    return Lane(
        kind="post",
        label=_("Post"),
        start=at,
        end=at,
        tone="info",
        note=note,
        url=f"{view.url('inbox')}#section",
    )


def _sub_agent(ref: dict[str, Any], urls: dict[str, str], now: datetime) -> Lane:
    end = now if ref["status"] == "running" else ref["updated_at"]
    return Lane(
        kind="sub-agent",
        label=ref["agent_type"],
        start=ref["created_at"],
        end=max(end, ref["created_at"]),
        tone=tone(ref["status"]),
        note=f"{gettext('sub-agent')} · {printable(name_of_status(ref['status']))}",
        url=urls.get(ref["sub_session_id"], ""),
    )


def _decision(view: SessionView, row: dict[str, Any], people: People) -> Lane:
    at = row["decided_at"]
    outcome = dict(DecisionOutcome.choices).get(row["outcome"], printable(row["outcome"]))
    by = people.named(row["actor"])
    return Lane(
        kind="decision",
        label=printable(row["tool_call_id"]),
        start=at,
        end=at,
        tone="good" if row["outcome"] == DecisionOutcome.APPROVED else "bad",
        note=gettext("%(outcome)s by %(who)s") % {"outcome": outcome, "who": by} if by else str(outcome),
        url=f"{view.url('waits')}#section",
    )


def _waits(run: dict[str, Any]) -> bool:
    """Return whether the session waits from the end of this run until the next one starts."""
    return run["status"] in SUSPENDED_STATUSES and run["ended_at"] is not None


# --- A step, opened


def _opened(view: SessionView, step: dict[str, Any], spent: Spent) -> dict[str, Any]:
    """Return what a step has stored: its messages, and what it has changed in the custom state."""
    before = step["before"]
    first = 1 if before is None else before["message_count"] + 1
    checkpoint_id = step["checkpoint_id"]
    checkpoint = None
    if checkpoint_id:
        checkpoint = link(view.page.page_url(Checkpoint, step["pk"]), identifier(checkpoint_id))
    return {
        "address": printable(f"{view.session.session_id}@step-{step['step_count']}"),
        "checkpoint": checkpoint,
        "at": stamp(step["created_at"]),
        "spent": str(spent),
        "blocks": messages_as_blocks(view, first, step["message_count"]) if view.may_view(Message) else [],
        "conversation_url": view.url("conversation", step=step["step_count"]),
        **_changes(view, before, step),
    }


def _changes(view: SessionView, before: dict[str, Any] | None, step: dict[str, Any]) -> dict[str, Any]:
    rows = [row for row in (before, step) if row is not None]
    if any(row["checkpoint_id"] is None for row in rows) or (before is None and step["step_count"] > 1):
        return {"problem": _("The checkpoint before it was deleted, so its changes are not known.")}
    if max(row["size_bytes"] for row in rows) > _LARGEST_STATE:
        return {"problem": _("The state is too large to compare it here.")}
    states = []
    try:
        for row in rows:
            found = view.store.get_checkpoint(view.session.session_id, row["checkpoint_id"])
            states.append({} if found is None else found.state.custom_state)
    except HelixStoreError as error:
        return {"problem": str(error)}
    old, new = ({}, states[0]) if before is None else states
    return {"changes": difference(changes_between(old, new))}


# --- Failed calls


def _failures(view: SessionView) -> list[dict[str, Any]]:
    """Return the newest failed calls of the session, and of its sub-sessions if it is the root of a tree."""
    session, name = view.session, view.text("failed")
    keys = [session.pk]
    if session.root_session_id in (None, session.session_id):
        tree = Session.objects.using(view.alias).filter(
            tenant=session.tenant, root_session_id=session.session_id
        )
        keys += tree.exclude(pk=session.pk).values_list("pk", flat=True)[:_TREE]
    entries = UsageEntry.objects.using(view.alias).filter(session__in=keys, success=False)
    if name:
        entries = entries.filter(Q(tool_name=name) | Q(agent_type=name, kind=UsageKind.SUBAGENT))
    columns = ("session_id", "recorded_for", "kind", "tool_name", "agent_type", "step_count", "timestamp")
    found = entries.order_by("-timestamp", "-pk").values(*columns, "duration_ms")[:_FAILURES]
    return [
        {
            "name": printable(row["tool_name"] or row["agent_type"] or NOTHING),
            "kind": name_of_status(row["kind"]),
            "session": "" if row["session_id"] == session.pk else identifier(row["recorded_for"]),
            "step": row["step_count"],
            "url": _step_url(view, row["session_id"], row["step_count"]),
            "at": distance(row["timestamp"]),
            "took": NOTHING if row["duration_ms"] is None else _took(row["duration_ms"]),
        }
        for row in found
    ]


def _step_url(view: SessionView, key: int, number: int) -> str:
    return f"{view.page.page_url(Session, key)}?section=timeline&step={number}#step-{number}"


def _took(milliseconds: int) -> str:
    return duration(timedelta(milliseconds=min(milliseconds, _LONGEST_CALL)))


def _pages(view: SessionView, shown: Shown) -> dict[str, Any]:
    """Return links to the other runs and steps."""
    first = shown.steps[0]["step_count"] if shown.steps else 0
    last = shown.steps[-1]["step_count"] if shown.steps else 0
    turn = shown.runs[0]["turn"]
    pages: dict[str, Any] = {"steps_shown": len(shown.steps) if shown.has_older_steps else 0}
    if not shown.is_one:
        pages["older_url"] = view.url(before=turn) if shown.has_older_runs else ""
        pages["newest_url"] = view.url() if view.number("before") is not None else ""
        return pages
    pages["all_url"] = view.url()
    pages["previous_url"] = view.url(run=turn - 1) if turn > 1 else ""
    pages["next_url"] = "" if shown.following is None else view.url(run=shown.following["turn"])
    pages["older_steps_url"] = view.url(run=turn, until=first - 1) if shown.has_older_steps else ""
    has_newer = shown.until is not None and last < shown.runs[0]["step_count"] and last == shown.until
    pages["newer_steps_url"] = view.url(run=turn, until=last + _STEPS) if has_newer else ""
    return pages
