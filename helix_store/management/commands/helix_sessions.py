"""``helix_sessions``: list, read and manage sessions."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, Final, get_args

from django.apps import apps
from django.contrib.auth import get_user_model
from django.core.management.base import CommandError

from helix_store.actions import SESSION_ACTIONS
from helix_store.actions.answers import ANSWER, APPROVE, ERROR, REJECT, RESULT
from helix_store.actions.effects import DONE, SETTLE
from helix_store.actions.sessions import SessionAction
from helix_store.core.contracts import SESSION_FILTERS
from helix_store.core.effects import EffectState
from helix_store.core.posts import Post, PostState
from helix_store.core.types import UNSET, SessionStatus
from helix_store.engine.database import Database
from helix_store.management.base import (
    ActingCommand,
    WrongUsage,
    add_limit_argument,
    add_named_argument,
    at_least,
    chosen_call,
    chosen_session,
    directory_of,
    whole_id,
)
from helix_store.management.output import Column, visible
from helix_store.management.session_page import (
    EFFECT_COLUMNS,
    POST_COLUMNS,
    SESSION_COLUMNS,
    SESSION_OF_EFFECT,
    ListedSession,
    session_sections,
    tree_lines,
    whole_sections,
)
from helix_store.reports.conversations import conversation_as_markdown, outlines_of_heads
from helix_store.reports.payloads import time_argument
from helix_store.reports.session import (
    nodes_of,
    report_as_json,
    session_report,
    session_tree,
    whole_messages,
)
from helix_store.sessions.messages import announce_due_posts
from helix_store.stores import DatabaseStateStore
from helix_store.stores.conditions import CONDITIONS, announce_ready, conditions_of_ids

_NO_FILTERS: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("agent_type", "status", "user_id", "root_session_id", "workspace_id", "tags")),
    **dict.fromkeys(("created_from", "created_to", "cursor")),
    "parent_session_id": UNSET,
    "metadata": {},
    "offset": 0,
    "count": False,
    "order_by": "updated_at",
    "direction": "desc",
}
_STATUSES = [status.value for status in SessionStatus]
_POST_STATES: Final = get_args(PostState)
_EFFECT_STATES: Final = get_args(EffectState)
_POSTS_AT_ONCE: Final = 200
_SECONDS_BETWEEN_LOOKS: Final = 0.2
_POST_COLUMNS: Final = (
    *POST_COLUMNS[:2],
    Column("state", attrgetter("state"), cut="never"),
    *POST_COLUMNS[2:],
    Column("due", lambda post: post.not_before or post.posted_at, cut="never"),
    Column("message", lambda post: _content(post), minimum=12, may_be_empty=True),
)


class Command(ActingCommand):
    help = "List, read and manage sessions."

    def add_parts(self) -> None:
        self._add_list()

        parser = self.add_part("show", self._show, example="trip-1 --messages 20")
        parser.add_argument("session_id", metavar="ID")
        parser.add_argument(
            "--messages", type=at_least(1), metavar="N", help="Also print the newest N messages."
        )
        add_limit_argument(parser, "posts, runs and checkpoints", default=10)
        parser.add_argument(
            "--markdown",
            action="store_true",
            help="Print the whole conversation as Markdown, and nothing else.",
        )

        parser = self.add_part("tree", self._tree, example="trip-1")
        parser.add_argument("session_id", metavar="ID")
        parser.add_argument(
            "--from-root", action="store_true", help="Begin at the root of the tree that the session is in."
        )

        for action in SESSION_ACTIONS:
            if action.help:
                self.add_action(action)

        parser = self.add_part("posts", self._posts, example="trip-1 --state waiting --state received")
        parser.add_argument("session_id", metavar="ID")
        parser.add_argument(
            "--state",
            dest="states",
            action="append",
            choices=_POST_STATES,
            help="Only posts in this state (default: waiting); may be repeated.",
        )
        add_limit_argument(parser, "posts", default=50)
        parser.add_argument("--cursor", help="Continue a list with the same states at its next_cursor.")

        parser = self.add_part("effects", self._effects, example="trip-1 --state unknown")
        parser.add_argument(
            "session_id",
            metavar="ID",
            nargs="?",
            help="Without it, the unknown effects of all sessions of the tenant, the oldest first.",
        )
        parser.add_argument(
            "--state",
            dest="states",
            action="append",
            choices=_EFFECT_STATES,
            help="Only effects in this state; may be repeated.",
        )
        add_limit_argument(parser, "effects", default=50)
        parser.add_argument("--cursor", help="Continue a list with the same states at its next_cursor.")

        parser = self.add_part("wake", self._wake, example="")
        add_limit_argument(parser, "sessions", default=200)

    # --- list

    def _add_list(self) -> None:
        parser = self.add_part("list", self._list, example="--status active --user user-1")
        parser.add_argument("--agent-type", help="Only sessions of this agent type.")
        parser.add_argument(
            "--status",
            action="append",
            choices=_STATUSES,
            help="Only sessions with this status; may be repeated.",
        )
        parser.add_argument(
            "--condition",
            dest="conditions",
            action="append",
            choices=CONDITIONS,
            help="Only sessions that cannot go on for this reason, the longest first; may be repeated. "
            "It cannot be combined with other filters.",
        )
        # The other names are those of the arguments of `list_sessions`.
        add_named_argument(parser, "--user", "--user-id", dest="user_id", help="Only sessions of this user.")
        family = parser.add_mutually_exclusive_group()
        add_named_argument(
            family,
            "--parent",
            "--parent-session-id",
            dest="parent_session_id",
            metavar="ID",
            default=UNSET,
            help="Only sub-sessions of this session.",
        )
        family.add_argument(
            "--roots",
            dest="parent_session_id",
            action="store_const",
            const=None,
            default=UNSET,
            help="Only sessions without a parent.",
        )
        add_named_argument(
            parser,
            "--root",
            "--root-session-id",
            dest="root_session_id",
            metavar="ID",
            help="Only sessions in the tree with this root.",
        )
        add_named_argument(
            parser,
            "--workspace",
            "--workspace-id",
            dest="workspace_id",
            metavar="ID",
            help="Only sessions with this workspace id.",
        )
        add_named_argument(
            parser,
            "--tag",
            "--tags",
            dest="tags",
            action="append",
            help="Only sessions with this tag; may be repeated.",
        )
        parser.add_argument(
            "--metadata",
            action="append",
            type=_key_and_value,
            metavar="KEY=VALUE",
            help="Only sessions with this value in their metadata; may be repeated.",
        )
        parser.add_argument(
            "--created-from", type=time_argument, metavar="TIME", help="Created at or after this time."
        )
        parser.add_argument(
            "--created-to", type=time_argument, metavar="TIME", help="Created before this time."
        )
        parser.add_argument("--order-by", choices=["updated_at", "created_at"], default="updated_at")
        parser.add_argument("--direction", choices=["desc", "asc"], default="desc")
        add_limit_argument(parser, "sessions", default=50)
        parser.add_argument("--offset", type=at_least(0), default=0, help="Skip this many sessions first.")
        parser.add_argument("--cursor", help="Continue a list with the same filters at its next_cursor.")
        parser.add_argument("--count", action="store_true", help="Count all sessions that match.")

    def _list(self, options: dict[str, Any]) -> None:
        """List sessions, most recently updated first. Filters are combined with AND."""
        for name in ("parent_session_id", "root_session_id"):
            if options[name] and options[name] is not UNSET:
                options[name] = whole_id(options[name], options)
        options["metadata"] = dict(options["metadata"] or ())
        if options["conditions"] and any(options[name] != each for name, each in _NO_FILTERS.items()):
            raise WrongUsage("--condition cannot be combined with other filters.")
        self.write_list(
            "sessions", _pages_of_sessions(options), columns=SESSION_COLUMNS, to_dict=_session_dict
        )

    # --- show and tree

    def _show(self, options: dict[str, Any]) -> None:
        """Show a session: its state, posts, runs, sub-sessions, checkpoints, usage and conversation."""
        store, session_id = chosen_session(options["session_id"], options)
        if options["markdown"]:
            for block in conversation_as_markdown(store, session_id):
                self.write_text(f"{block}\n\n")
            return
        newest = options["messages"]
        is_whole = newest is not None and (self.is_json or self.layout.is_whole)
        report = session_report(
            store, session_id, limit=options["limit"], messages=None if is_whole else newest
        )
        if self.is_json:
            for text in report_as_json(store, report, newest):
                self.write_text(text, ending="")
            self.write_text("")
        else:
            self.write_text("\n\n".join(session_sections(report, self.layout)))
            for text in (
                whole_sections(whole_messages(store, report, newest), self.layout) if is_whole else ()
            ):
                self.write_text(f"\n{text}")
        if report.problems:
            raise CommandError("; ".join(report.problems))

    def _tree(self, options: dict[str, Any]) -> None:
        """Show a session and all sub-sessions below it, including remote ones."""
        store, session_id = chosen_session(options["session_id"], options)
        tree = session_tree(store, session_id)
        if options["from_root"] and tree.head is not None:
            tree = session_tree(store, session_id, root_id=tree.head.root_session_id)
        if self.is_json:
            self.write_text(json.dumps({"tenant": store.tenant, "nodes": nodes_of(tree)}))
        else:
            self.write_text("\n".join(tree_lines(tree, self.layout)))

    # --- posts and wake

    def _posts(self, options: dict[str, Any]) -> None:
        """List the posts of a session in order."""
        store, session_id = chosen_session(options["session_id"], options)
        self.write_list(
            "posts",
            _pages_of_posts(store, session_id, options),
            columns=_POST_COLUMNS,
            to_dict=lambda post: {"tenant": store.tenant, **post.to_dict()},
        )

    def _effects(self, options: dict[str, Any]) -> None:
        """List the effects of a session in order, or the unknown effects of a tenant."""
        if options["session_id"] is None:
            if options["states"] or options["cursor"]:
                raise WrongUsage("--state and --cursor need the ID of a session.")
            store = directory_of(options).store(options["tenant"] or "")
            found = store.find_unknown_effects(limit=options["limit"])
            pages: Iterable[Any] = [SimpleNamespace(effects=found, next_cursor=None)]
        else:
            store, session_id = chosen_session(options["session_id"], options)
            pages = _pages_of_effects(store, session_id, options)
        self.write_list(
            "effects",
            pages,
            columns=EFFECT_COLUMNS if options["session_id"] else (SESSION_OF_EFFECT, *EFFECT_COLUMNS),
            to_dict=lambda effect: {"tenant": store.tenant, **effect.to_dict()},
        )

    def _wake(self, options: dict[str, Any]) -> None:
        """Send the signals session_posted and session_ready for sessions that a turn could continue.

        These are the sessions whose due posts nobody has picked up, those that are abandoned, those whose
        budget has room again, and those whose effect was settled.
        """
        self.look_for_tenant(options)
        chosen = {"using": options["database"], "tenant": options["tenant"], "limit": options["limit"]}
        announced = announce_due_posts(**chosen)
        self.write_data({"announced": announced, "ready": announce_ready(**chosen)})
        if apps.is_installed("helix_store.contrib.chat"):
            from helix_store.contrib.chat.driver import wait_for_turns

            # Without a runner, the turns of chats have begun in this process. A signal ends the wait.
            while not (self.stop.is_set() or wait_for_turns(_SECONDS_BETWEEN_LOOKS)):
                pass

    def target(
        self, action: SessionAction, options: Mapping[str, Any], *, is_whole: bool
    ) -> tuple[DatabaseStateStore, str, Mapping[str, Any]]:
        if action in (ANSWER, SETTLE) and options["user"] is not None and options["actor"] is not None:
            raise WrongUsage("Pass either --as or --actor.")
        if action is ANSWER:
            _check_answer(options)
        if action is SETTLE and options["result"] is not None and options["outcome"] != DONE:
            raise WrongUsage("not_done takes no --result.")
        store, session_id, given = super().target(action, options, is_whole=is_whole)
        if action is SETTLE and options["user"] is not None:
            return store, session_id, {**given, "actor": _user(options["user"])}
        if action is not ANSWER:
            return store, session_id, given
        call_id, approval_id = chosen_call(store, session_id, options["call"])
        answer = {**given, "call": call_id, "approval": approval_id}
        if options["user"] is not None:
            answer["actor"] = _user(options["user"])
        return store, session_id, answer


def _check_answer(options: Mapping[str, Any]) -> None:
    """Refuse a value or a reason that the answer does not accept."""
    answer = options["answer"]
    if options["value"] is not None and answer in (APPROVE, REJECT):
        raise WrongUsage(f"{answer} takes no VALUE; use --reason.")
    if options["value"] is None and answer == ERROR:
        raise WrongUsage("error needs a VALUE.")
    if options["edit"] is not UNSET and answer != APPROVE:
        raise WrongUsage(f"{answer} takes no --input.")
    if options["reason"] is not None and answer in (RESULT, ERROR):
        raise WrongUsage(f"{answer} takes no --reason.")


def _user(name: str) -> Any:
    model = get_user_model()
    try:
        return model._default_manager.get_by_natural_key(name)
    except model.DoesNotExist:
        raise WrongUsage(f"There is no user with the name {visible(name)}.") from None


def _pages_of_sessions(options: Mapping[str, Any]) -> Iterator[SimpleNamespace]:
    """Yield the pages of a list; each session has the outline of the conversation that an adapter keeps."""
    db = Database(options["database"], options["tenant"] or "")
    if options["conditions"]:
        yield _stuck_sessions(db, options)
        return
    for page in directory_of(options).pages(**{name: options[name] for name in SESSION_FILTERS}):
        outlined = zip(page.sessions, outlines_of_heads(db, page.sessions), strict=True)
        ids = [(tenant, head.session_id) for tenant, head in page.sessions]
        stuck = conditions_of_ids(db.alias, ids)
        sessions = [
            ListedSession(tenant, head, outline, stuck.get((tenant, head.session_id)))
            for (tenant, head), outline in outlined
        ]
        yield SimpleNamespace(sessions=sessions, total=page.total, next_cursor=page.next_cursor)


def _stuck_sessions(db: Database, options: Mapping[str, Any]) -> SimpleNamespace:
    """Return one page with the sessions that have a condition, the longest first."""
    found = directory_of(options).stuck(options["conditions"], limit=options["limit"])
    outlines = outlines_of_heads(db, [(tenant, head) for tenant, head, _ in found])
    sessions = [
        ListedSession(tenant, head, outline, stuck)
        for (tenant, head, stuck), outline in zip(found, outlines, strict=True)
    ]
    return SimpleNamespace(sessions=sessions, total=None, next_cursor=None)


def _session_dict(listed: ListedSession) -> dict[str, Any]:
    conversation = None
    if listed.found is not None:
        name, outline = listed.found
        conversation = {"framework": name, "message_count": outline.count, "is_partial": outline.is_partial}
    stuck = None if listed.stuck is None else listed.stuck.to_dict()
    return {
        "tenant": listed.tenant,
        **listed.head.to_dict(),
        "conversation": conversation,
        "stuck": stuck and {name: stuck[name] for name in ("condition", "since", "detail", "run_id")},
    }


def _pages_of_posts(
    store: DatabaseStateStore, session_id: str, options: Mapping[str, Any]
) -> Iterator[SimpleNamespace]:
    states = options["states"] or ["waiting"]
    rest, cursor = options["limit"], options["cursor"]
    while rest > 0:
        page = store.list_posts(session_id, states=states, limit=min(rest, _POSTS_AT_ONCE), cursor=cursor)
        yield SimpleNamespace(posts=page.items, next_cursor=page.next_cursor)
        rest, cursor = rest - len(page.items), page.next_cursor
        if cursor is None:
            return


def _pages_of_effects(
    store: DatabaseStateStore, session_id: str, options: Mapping[str, Any]
) -> Iterator[SimpleNamespace]:
    rest, cursor = options["limit"], options["cursor"]
    while rest > 0:
        page = store.list_effects(
            session_id, states=options["states"], limit=min(rest, _POSTS_AT_ONCE), cursor=cursor
        )
        yield SimpleNamespace(effects=page.items, next_cursor=page.next_cursor)
        rest, cursor = rest - len(page.items), page.next_cursor
        if cursor is None:
            return


def _content(post: Post) -> str:
    content = "" if post.message is None else post.message.get("content", "")
    return content if isinstance(content, str) else json.dumps(content)


def _key_and_value(text: str | tuple[str, str]) -> tuple[str, str]:
    if isinstance(text, tuple):
        return text
    key, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    return key, value
