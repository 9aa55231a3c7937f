"""What a session waits for, its inbox, and its effects."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from itertools import pairwise
from operator import itemgetter
from typing import Any, Final

from django.db.models import Exists, F, OuterRef, Q, QuerySet
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from helix_store.actions.answers import (
    ANSWER,
    WHOLE,
    People,
    demands_of,
    editable_text,
    is_shown_whole,
    mark_of_end,
)
from helix_store.actions.effects import SETTLE, SettleForm
from helix_store.actions.sessions import POST, WITHDRAW_POST
from helix_store.admin.base import Scope, is_searchable
from helix_store.admin.elements import (
    NOTHING,
    difference,
    distance,
    grouped,
    identifier,
    json_block,
    moment_of_epoch,
    name_of_status,
    narrow,
    one_line,
    printable,
    value_block,
)
from helix_store.admin.operating import Button
from helix_store.admin.records import PREVIEW_LENGTH
from helix_store.admin.sections.section import UNREADABLE, Section, SessionView
from helix_store.core import moments
from helix_store.core.approvals import canonical_json, digest_of_canonical
from helix_store.core.effects import effect_key
from helix_store.core.limits import MAX_BIGINT
from helix_store.core.transcript import visible, visible_json
from helix_store.exceptions import HelixStoreError, IntegrityFault
from helix_store.models import Decision, DecisionOutcome, Effect, EffectState, Lock, Post, StagedChange
from helix_store.models.sessions import OPEN_EFFECTS, OneOf, PostState
from helix_store.reports.payloads import (
    changes_between,
    difference_pages,
    document_of,
    document_start,
    few_changes,
    has_levels,
    json_start,
    laid_out,
    payload_of,
    starts_of_parts,
    with_payloads,
    without_payloads,
)
from helix_store.reports.session import WaitingPost, waiting_posts
from helix_store.sessions.statements import NO_EXCEPTION
from helix_store.sessions.tool_calls import (
    EDITED_FROM,
    LiveDecisions,
    ToolCalls,
    current_call,
    was_answered_at,
)
from helix_store.sessions.waiting import open_calls

_CALLS: Final = 50
_STAGED: Final = 20
_PART: Final = 100_000
_SHOWN: Final = 60_000
"""The maximum number of characters of the inputs of open calls on one page."""
_SHOWN_PARTS: Final = "helix_store_shown_parts"
"""The key of the user's session that holds the parts of long inputs that pages have shown."""
_INPUTS_RECORDED: Final = 20
_DECISIONS: Final = 1_000
"""The maximum number of decisions that the page reads about the calls it shows: at most ten for each."""


def open_calls_of(view: SessionView, pending: Any) -> dict[str, dict[str, Any]]:
    """Return the calls of a session's column that somebody still has to answer.

    This takes a statement if the state holds an answer that may be the agent's own.
    """
    view.read("live_decisions")
    calls = ToolCalls(pending if isinstance(pending, dict) else {}, {}, view.document("live_decisions"))
    return open_calls(view.db, {view.session.pk: calls})[view.session.pk]


def open_call(view: SessionView, key: str) -> dict[str, Any] | None:
    """Return one open call of a session as the section shows it, or ``None`` if it is no longer open."""
    view.read("pending_client_tool_calls", "live_decisions")
    pending = view.whole_document("pending_client_tool_calls")
    call = open_calls_of(view, {key: pending[key]} if isinstance(pending, dict) and key in pending else {})
    if not call:
        return None
    live = LiveDecisions(view.document("live_decisions"))
    (shown,) = _open(view, call, call, view.button(ANSWER), People.of([*call.items()], live), {}, live)
    return shown


class Waits(Section):
    name = "waits"
    label = _("Waiting")

    def context(self, view: SessionView) -> dict[str, Any]:
        view.read(
            "pending_client_tool_calls",
            "completed_client_tool_calls",
            "live_decisions",
            "client_tool_call_ownership",
            "suspension_context",
            "suspended_awaiting_children",
        )
        # A person reads a call's input to its end.
        pending = view.whole_document("pending_client_tool_calls")
        is_cut = view.is_cut("completed_client_tool_calls")
        completed = UNREADABLE if is_cut else view.document("completed_client_tool_calls")
        button = view.button(ANSWER)
        answered = completed.items() if isinstance(completed, dict) else ()
        newest = list(answered)[-_CALLS:][::-1]
        live = LiveDecisions(view.document("live_decisions"))
        still_open = open_calls_of(view, pending)
        listed = [*_items(pending), *newest]
        decisions = _decisions_about(view, [key for key, call in listed if _is_answered(call)])
        people = People.of(listed, live, decided_by=[row["actor"] for row in decisions])
        finals = _finals(view, decisions, people)
        return {
            "pending": sorted(
                _open(view, pending, still_open, button, people, finals, live), key=itemgetter("is_answered")
            ),
            "pending_text": _damaged_text(view, "pending_client_tool_calls", pending),
            "completed": [
                _call(key, call, None, people, finals.get(key), is_answered=_is_answered(call))
                for key, call in newest
            ],
            "completed_count": len(answered),
            "completed_text": _damaged_text(view, "completed_client_tool_calls", completed),
            "elsewhere": self._elsewhere(view),
            "suspension_kind": printable(name_of_status(view.session.suspension_kind or "")),
            "suspended_step": printable(view.session.suspended_step_id or ""),
            "suspension": _shown(view, "suspension_context"),
            "awaited": _shown(view, "suspended_awaiting_children"),
            "may_answer": ANSWER.is_permitted(view.request.user),
            "decisions": _decisions(view),
            "staged": self._staged(view) if view.may_view(StagedChange) else None,
            "next": view.url(),
        }

    def _elsewhere(self, view: SessionView) -> list[Any]:
        """Return links to the sub-sessions that own calls of this tree."""
        owners = view.document("client_tool_call_ownership")
        if not isinstance(owners, dict):
            return []
        others = [
            owner
            for owner in dict.fromkeys(str(each) for each in list(owners.values())[-_CALLS:])
            if owner != view.session.session_id
        ]
        links = view.session_links(others)
        return [links[owner] for owner in others]

    def _staged(self, view: SessionView) -> dict[str, Any]:
        found = list(with_payloads(view.rows(StagedChange).order_by("pk"))[: _STAGED + 1])
        return {
            "has_more": len(found) > _STAGED,
            "rows": [
                {
                    "step": printable(row.step_id),
                    "call": printable(row.tool_call_id),
                    "at": distance(row.created_at),
                    "changes": json_block(payload_of(row, "payload")),
                }
                for row in found[:_STAGED]
            ],
        }


_DECIDED: Final = (
    *("tool_call_id", "asking", "outcome", "is_final", "actor", "reason", "decided_at"),
    *("used_by_step", "used_by_effect"),
)


def _read_decisions(decisions: QuerySet[Any], limit: int = _CALLS) -> list[dict[str, Any]]:
    """Return the newest decisions with the starts of what was approved, the newest first."""
    content = document_start("content")
    return list(decisions.order_by("-version").values(*_DECIDED, content_start=content)[:limit])


def _decisions(view: SessionView) -> list[dict[str, Any]]:
    """Return the newest decisions about approvals: who has answered which call, what, and when."""
    if not view.may_view(Decision):
        return []
    found = _read_decisions(view.rows(Decision))
    people = People.of_actors(row["actor"] for row in found)
    return [_decided(row, people) for row in found]


def _about(view: SessionView, tool_call_ids: Iterable[str]) -> QuerySet[Any]:
    """Return the decisions about these calls. No answer can name an id that a database cannot compare."""
    return view.rows(Decision).filter(tool_call_id__in=list(filter(is_searchable, tool_call_ids)))


def _decided(row: dict[str, Any], people: People) -> dict[str, Any]:
    """Return a decision for a page. ``arguments`` is the approved input, or `UNREADABLE` if it is unknown."""
    tool, arguments = "", UNREADABLE
    if row["content_start"] is not None:
        with suppress(IntegrityFault, RecursionError, ValueError, TypeError):
            tool, arguments = document_of(row["content_start"])
    step, effect = row["used_by_step"], row["used_by_effect"]
    return {
        "call": visible(row["tool_call_id"]),
        "tool": visible(tool) if isinstance(tool, str) else "",
        "outcome": dict(DecisionOutcome.choices).get(row["outcome"], visible(row["outcome"])),
        "is_approved": row["outcome"] == DecisionOutcome.APPROVED,
        "is_error": row["outcome"] == DecisionOutcome.ERROR,
        "is_final": row["is_final"],
        "by": people.named(row["actor"]),
        "reason": visible(row["reason"] or ""),
        "decided_at": row["decided_at"],
        "at": distance(row["decided_at"]),
        "used_by": visible(step or effect or ""),
        "used_by_effect": step is None and effect is not None,
        "arguments": arguments,
        "input": "" if arguments is UNREADABLE else value_block(arguments, open_up_to=0),
    }


def mark_approvals(view: SessionView, calls: Mapping[str, dict[str, Any]]) -> None:
    """Set who has asked and decided about the calls of a conversation, by their ids.

    ``given`` of a call are its arguments as text. If they are JSON, they tell whether the approved input is
    another one. This takes two statements, and one for the names of the people.
    """
    if not calls or not view.may_view(Decision):
        return
    view.read("pending_client_tool_calls", "completed_client_tool_calls", "live_decisions")
    pending, completed = (
        dict(_items(view.document(name)))
        for name in ("pending_client_tool_calls", "completed_client_tool_calls")
    )
    found = _read_decisions(_about(view, calls))
    entries = {key: entry for key, entry in {**pending, **completed}.items() if isinstance(entry, dict)}
    askers = (entries.get(key, {}).get("requester") for key in calls)
    people = People.of_actors([*(row["actor"] for row in found), *askers])
    for row in reversed(found):
        call, decision = calls[row["tool_call_id"]], _decided(row, people)
        decision["is_edited"] = _is_edited(call["given"], decision["arguments"])
        if decision["is_edited"]:
            decision["shown"] = visible_json(json_start(decision["arguments"], WHOLE)[0])
        call.setdefault("decisions", []).append(decision)
    still_open = open_calls_of(view, {key: entry for key, entry in pending.items() if key in calls})
    for key, call in calls.items():
        entry = entries.get(key)
        if entry is None or entry.get("approval_id") is None:
            continue
        call["asked_by"] = people.named(entry.get("requester"))
        call["asked"] = distance(moment_of_epoch(entry.get("requested_at")))
        is_open = key in still_open and key not in completed
        call["answer_url"] = f"{view.url('waits', call=key)}#section" if is_open else ""


def _is_edited(given: str, arguments: Any) -> bool:
    """Return whether an approved input is known to differ from the arguments of the call."""
    if arguments is UNREADABLE:
        return False
    try:
        return canonical_json(json.loads(given)) != canonical_json(arguments)
    except (ValueError, RecursionError, HelixStoreError):
        return False


def _is_answered(call: Any) -> bool:
    """Return whether the state holds an answer to a call, which may be the agent's own."""
    return isinstance(call, dict) and "submitted_at" in call


def _decisions_about(view: SessionView, tool_call_ids: list[str]) -> list[dict[str, Any]]:
    """Return the decisions about these calls, without what was approved if the user may not view it."""
    if not tool_call_ids:
        return []
    found = _read_decisions(_about(view, tool_call_ids), _DECISIONS)
    return found if view.may_view(Decision) else [{**row, "content_start": None} for row in found]


def _finals(view: SessionView, decisions: list[dict[str, Any]], people: People) -> dict[str, dict[str, Any]]:
    """Return the newest final decisions: who has decided what, and what has used it, by tool call id."""
    finals = {}
    actors: dict[tuple[Any, ...], list[Any]] = defaultdict(list)
    for row in reversed(decisions):
        agreed = actors[row["tool_call_id"], row["asking"], row["outcome"]]
        agreed.append(row["actor"])
        if row["is_final"]:
            finals[row["tool_call_id"]] = {**_decided(row, people), "by": people.names(agreed)}
    return finals


def _open(
    view: SessionView,
    document: Any,
    still_open: Container[str],
    button: Button | None,
    people: People,
    finals: dict[str, dict[str, Any]],
    live: LiveDecisions,
) -> list[dict[str, Any]]:
    """Return the pending calls, or only the one that the URL names."""
    calls = dict(_items(document))
    named = view.text("call")
    if isinstance(document, dict) and named in document:
        calls = {named: document[named]}
    room = _SHOWN
    found = []
    for key, call in calls.items():
        entry = call if isinstance(call, dict) else {"input": call}
        text, is_cut = json_start(entry.get("input"), min(room, WHOLE))
        is_answered = _is_answered(call) and key not in still_open
        shown = _call(key, call, button, people, finals.get(key), is_answered=is_answered)
        found.append(shown)
        if "answer" in shown:
            continue
        # Writing a long input takes time, so it is written once: for its digest and for its parts.
        whole = canonical_json(entry.get("input"))
        current = current_call(entry, digest_of_canonical(entry.get("tool_name"), whole))
        shown["digest"] = current["digest"]
        shown["demands"] = demands_of(view.request.user, key, current, people, live)
        if not is_cut and is_shown_whole(entry):
            room -= len(text)
            changes = changes_between(entry[EDITED_FROM], entry.get("input")) if EDITED_FROM in entry else ()
            shown["whole"] = "" if entry.get("input") is None else visible_json(text)
            shown |= {"may_approve": True, "editor": editable_text(entry), "changes": difference(changes)}
        elif key == named:
            shown |= _part(view, key, entry, whole, current["digest"])
        else:
            shown["read_url"] = view.url(call=key)
    return found


def _part(view: SessionView, key: str, entry: dict[str, Any], text: str, digest: str) -> dict[str, Any]:
    """Return a part of a long input, or of what somebody has changed in it. A user who has seen all parts can
    approve it.

    If there are more changes than people can read, the parts of the requested input are shown instead.
    """
    spans = [("text", text, *span) for span in _spans(text)]
    differences: list[list[dict[str, Any]]] = []
    if EDITED_FROM in entry:
        changes = few_changes(entry[EDITED_FROM], entry.get("input"))
        if changes is None:
            requested = canonical_json(entry[EDITED_FROM])
            spans += [("requested", requested, *span) for span in _spans(requested)]
        else:
            differences = list(difference_pages(changes))
    count = len(spans) + len(differences)
    number = min(max(view.number("part") or 1, 1), count)
    missing = _parts_not_shown(view, digest, number, count)
    part: dict[str, Any] = {"number": number, "count": count, "mark": ""}
    if number <= len(spans):
        name, shown, start, end = spans[number - 1]
        part[name] = laid_out(shown, start, end)
        part["has_levels"] = has_levels(part[name])
    else:
        part["lines"] = differences[number - 1 - len(spans)]
    if not missing:
        part["mark"] = mark_of_end(view.request.user, digest)
    return {
        "part": part,
        "previous_url": view.url(call=key, part=number - 1) if number > 1 else "",
        "next_url": view.url(call=key, part=number + 1) if number < count else "",
        "missing_url": view.url(call=key, part=missing[0]) if missing and number == count else "",
        "may_approve": not missing,
    }


def _spans(text: str) -> list[tuple[int, int]]:
    """Return where the parts of a text begin and end."""
    return list(pairwise([*starts_of_parts(text, _PART), len(text)]))


def _parts_not_shown(view: SessionView, digest: str, number: int, count: int) -> list[int]:
    """Record in the user's session that a part has been shown, and return the parts that have not been."""
    session = view.request.session
    name = f"{view.request.user.pk} {digest} {count}"
    stored = session.get(_SHOWN_PARTS)
    shown = stored if isinstance(stored, dict) else {}
    parts = {*_list(shown.get(name)), number}
    others = [(each, seen) for each, seen in shown.items() if each != name][1 - _INPUTS_RECORDED :]
    session[_SHOWN_PARTS] = dict([*others, (name, sorted(parts))])
    return [each for each in range(1, count + 1) if each not in parts]


def _items(document: Any) -> list[tuple[str, Any]]:
    return list(document.items())[:_CALLS] if isinstance(document, dict) else []


def _damaged_text(view: SessionView, column: str, document: Any) -> SafeString | str:
    return "" if document is None or isinstance(document, dict) else json_block(view.texts[column])


def _shown(view: SessionView, column: str) -> SafeString | str:
    return "" if view.texts[column] is None else json_block(view.texts[column])


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _call(
    key: str,
    call: Any,
    button: Button | None,
    people: People,
    final: dict[str, Any] | None = None,
    *,
    is_answered: bool,
) -> dict[str, Any]:
    """Return a call, answered or not. ``approval`` is the approval id as stored, for the form.

    An answered approval is shown as its ``final`` decision says, because the agent can write the state.
    """
    entry = call if isinstance(call, dict) else {"input": call}
    deadline, approval = moment_of_epoch(entry.get("deadline")), entry.get("approval_id")
    shown: dict[str, Any] = {
        "id": key,
        "shown_id": visible(key),
        "tool": _text(entry.get("tool_name")),
        "requested": distance(moment_of_epoch(entry.get("requested_at"))),
        "deadline": distance(deadline),
        "default": _default(entry.get("on_expiry")),
        "approval": approval if isinstance(approval, str) else None,
    }
    if not is_answered:
        is_overdue = deadline is not None and deadline < moments.now()
        return {**shown, "is_overdue": is_overdue, "button": button, "is_answered": False}
    if final is not None and not was_answered_at(entry, final["decided_at"]):
        final = None
    answer = next((name for name in ("approved", "error", "result") if name in entry), "")
    is_claimed = final is None and answer == "approved"
    shown |= {
        "input": _block(entry.get("input")),
        "answer": _answer_word(answer, entry),
        "answer_value": _answer_value(answer, entry),
        "answered": distance(moment_of_epoch(entry["submitted_at"])),
        "answered_by": "" if is_claimed else people.names(entry.get("actors")),
        "is_claimed": is_claimed,
        "is_answered": True,
    }
    return shown if final is None else shown | _decided_call(entry, final)


def _decided_call(entry: dict[str, Any], final: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an answered call that its final decision determines."""
    shown: dict[str, Any] = {
        "answer": final["outcome"],
        "answered": final["at"],
        "answered_by": final["by"],
        "used_by": final["used_by"],
        "used_by_effect": final["used_by_effect"],
    }
    if not final["is_error"]:
        shown["answer_value"] = final["reason"]
    if final["tool"]:
        shown["tool"] = final["tool"]
    if final["arguments"] is not UNREADABLE:
        shown["input"] = _block(final["arguments"])
        # If there are too many changes, people cannot read them.
        edits = few_changes(entry[EDITED_FROM], final["arguments"]) if EDITED_FROM in entry else ()
        shown["changes"] = difference(edits or ())
    return shown


def _text(value: Any) -> str:
    return visible(value) if isinstance(value, str) else NOTHING


def _default(default: Any) -> str:
    if default == "fail":
        return str(_("fails with an error"))
    if default == "reject":
        return str(_("is rejected"))
    return "" if default is None else str(_("gets its default result"))


def _answer_word(answer: str, entry: dict[str, Any]) -> str:
    if answer == "approved":
        return str(_("approved") if entry["approved"] is True else _("rejected"))
    return str({"error": _("answered with an error"), "result": _("answered")}.get(answer, _("answered")))


def _answer_value(answer: str, entry: dict[str, Any]) -> SafeString | str:
    if answer == "approved":
        return _text(entry["reason"]) if entry.get("reason") else ""
    return _block(entry.get(answer))


def _block(value: Any) -> SafeString | str:
    return "" if value is None else value_block(value)


_PAGE: Final = 25


class Inbox(Section):
    name = "inbox"
    label = _("Inbox")
    needs = (Post,)

    def context(self, view: SessionView) -> dict[str, Any]:
        posts = without_payloads(view.rows(Post))
        first = view.number("waiting") or 0
        before = view.number("before")
        waiting = waiting_posts(posts, first=first, limit=_PAGE)
        others = posts.exclude(state=PostState.WAITING).order_by("-sequence")
        past = list(others.filter(sequence__lte=MAX_BIGINT if before is None else before)[: _PAGE + 1])
        return {
            "waiting": [_waiting(post) for post in waiting.items],
            "total": waiting.total,
            "first_url": view.url() if first else "",
            "next_url": view.url(waiting=first + _PAGE) if first + _PAGE < waiting.total else "",
            "past": [_past(row) for row in past[:_PAGE]],
            "newest_url": view.url() if before is not None else "",
            "older_url": view.url(before=past[_PAGE].sequence) if len(past) > _PAGE else "",
            "post": view.button(POST),
            "withdraw": view.button(WITHDRAW_POST),
            "form": POST.form(),
            "zone": timezone.get_current_timezone_name(),
            "next": view.url(),
        }


def _waiting(post: WaitingPost) -> dict[str, Any]:
    text = None if post.text is None else one_line(post.text, PREVIEW_LENGTH)
    return {**_named(post), "id": post.post_id, "text": text, "due": distance(post.due_at)}


def _past(row: Any) -> dict[str, Any]:
    state = row.get_state_display()
    if row.received_at is not None:
        state = format_html("<span>{} {}</span>", state, distance(row.received_at))
    return {
        **_named(row),
        "state": state,
        "position": NOTHING if row.position is None else grouped(row.position),
    }


def _named(row: Any) -> dict[str, Any]:
    return {
        "author": narrow(row.author) if row.author else NOTHING,
        "key": identifier(row.key) if row.key else NOTHING,
        "posted": distance(row.posted_at),
    }


_EFFECTS: Final = 20
_DOCUMENTS: Final = ("input", "result", "error", "actors")


def with_held(effects: QuerySet[Any]) -> QuerySet[Any]:
    """Annotate effects with whether the lock of the session is held with their token."""
    of_effect = Lock.objects.filter(
        tenant=OuterRef("session__tenant"),
        name=OuterRef("session__session_id"),
        token=OuterRef("fencing_token"),
        expires_at__gt=moments.now(),
    )
    annotated: QuerySet[Any] = effects.annotate(is_held=Exists(of_effect))
    return annotated


def unknown_effects(scope: Scope) -> QuerySet[Any]:
    """Return the effects of which nobody knows whether they happened, the oldest first."""
    open_effects = scope.rows(Effect).filter(OneOf(F("state"), OPEN_EFFECTS))
    is_unknown = Q(state=EffectState.UNKNOWN) | Q(is_held=False)
    return with_held(open_effects).filter(is_unknown).order_by("started_at", "pk")


class Effects(Section):
    name = "effects"
    label = _("Effects")
    needs = (Effect,)

    def context(self, view: SessionView) -> dict[str, Any]:
        before = view.number("before")
        newest = with_held(view.rows(Effect)).order_by("-sequence")
        rows = without_payloads(newest.filter(sequence__lte=MAX_BIGINT if before is None else before))
        starts = {f"{name}_start": document_start(name) for name in _DOCUMENTS}
        found = list(rows.annotate(**starts)[: _EFFECTS + 1])
        return {
            "effects": [_shown_effect(view, row) for row in found[:_EFFECTS]],
            "newest_url": view.url() if before is not None else "",
            "older_url": view.url(before=found[_EFFECTS].sequence) if len(found) > _EFFECTS else "",
            "settle": view.button(SETTLE),
            "form": SettleForm(),
            "next": view.url(),
        }


def _shown_effect(view: SessionView, row: Any) -> dict[str, Any]:
    is_unknown = row.state == EffectState.UNKNOWN or (row.state == EffectState.STARTED and not row.is_held)
    return {
        "id": row.effect_id,
        "shown_id": visible(row.effect_id),
        "tool": visible(row.tool_name),
        "key": effect_key(view.session.tenant, view.session.session_id, row.effect_id),
        "is_unknown": is_unknown,
        "state": EffectState.UNKNOWN.label if is_unknown else row.get_state_display(),
        "attempt": row.attempt,
        "run": visible(row.run_id or ""),
        "step": row.step_count,
        "started": distance(row.started_at),
        "ended": "" if row.ended_at is None else distance(row.ended_at),
        "input": json_block(row.input_start),
        "result": "" if row.state != EffectState.DONE else json_block(row.result_start),
        "error": "" if row.error_start in (None, NO_EXCEPTION) else json_block(row.error_start),
        "actors": "" if row.actors_start == "[]" else json_block(row.actors_start),
    }
