"""``helix_sessions``: list, read and manage sessions."""

from __future__ import annotations

import argparse
import json
from typing import Any

from django.core.management.base import CommandError

from helix_store.core.types import UNSET, SessionStatus, StatusConflict
from helix_store.exceptions import InvalidPayload, SessionNotFound
from helix_store.management.base import PROBLEMS_FOUND, USAGE, StoreCommandWithParts, at_least
from helix_store.management.output import Table
from helix_store.management.session_argument import directory_of, store_of, time_argument
from helix_store.management.session_page import (
    SESSION_COLUMNS,
    session_row,
    session_sections,
    tree_lines,
)
from helix_store.management.session_report import session_report
from helix_store.management.text import visible
from helix_store.sessions.directory import DirectoryPage, TreeNode

__all__ = ["Command"]

_STATUSES = [status.value for status in SessionStatus]


class Command(StoreCommandWithParts):
    help = "List, read and manage sessions."

    def add_parts(self, parts: Any) -> None:
        self._add_list(parts)
        self._add_show(parts)
        self._add_tree(parts)
        self._add_set_status(parts)
        self._add_interrupt(parts)
        self._add_delete(parts)

    # --- list

    def _add_list(self, parts: Any) -> None:
        parser = self.add_part(
            parts,
            "list",
            self._list,
            help="List sessions, the last updated first. Filters are combined with AND.",
            epilog="example: manage.py helix_sessions list --status active --user user-1",
        )
        parser.add_argument("--agent-type", help="Only of this agent type.")
        parser.add_argument(
            "--status", action="append", choices=_STATUSES, help="Only with this status; may be repeated."
        )
        parser.add_argument("--user", help="Only of this user id.")
        family = parser.add_mutually_exclusive_group()
        family.add_argument("--parent", metavar="ID", help="Only sub-sessions of this session.")
        family.add_argument("--roots", action="store_true", help="Only sessions without a parent.")
        parser.add_argument("--root", metavar="ID", help="Only sessions of the tree of this root.")
        parser.add_argument("--workspace", metavar="ID", help="Only with this workspace id.")
        parser.add_argument("--tag", action="append", help="Only with this tag; may be repeated.")
        parser.add_argument(
            "--metadata",
            action="append",
            type=_key_and_value,
            metavar="KEY=VALUE",
            help="Only with this value in the metadata; may be repeated.",
        )
        parser.add_argument(
            "--created-from", type=time_argument, metavar="TIME", help="Created at or after this time."
        )
        parser.add_argument(
            "--created-to", type=time_argument, metavar="TIME", help="Created before this time."
        )
        parser.add_argument("--order-by", choices=["updated_at", "created_at"], default="updated_at")
        parser.add_argument("--direction", choices=["desc", "asc"], default="desc")
        parser.add_argument(
            "--limit", type=at_least(1), default=50, help="At most so many sessions (default: %(default)s)."
        )
        parser.add_argument("--offset", type=at_least(0), default=0, help="Leave out so many sessions first.")
        parser.add_argument("--cursor", help="Continue after a list with the same filters.")
        parser.add_argument("--count", action="store_true", help="Count all sessions that match.")

    def _list(self, options: dict[str, Any]) -> None:
        pages = directory_of(options).pages(
            limit=options["limit"],
            offset=options["offset"],
            cursor=options["cursor"],
            count=options["count"],
            agent_type=options["agent_type"],
            status=options["status"],
            user_id=options["user"],
            parent_session_id=None if options["roots"] else options["parent"] or UNSET,
            root_session_id=options["root"],
            workspace_id=options["workspace"],
            tags=options["tag"],
            metadata=dict(options["metadata"] or ()),
            created_from=options["created_from"],
            created_to=options["created_to"],
            order_by=options["order_by"],
            direction=options["direction"],
        )
        write = self._write_list_as_json if options["format"] == "json" else self._write_list
        listed, total, last = 0, None, None
        try:
            with self.progress_bar("sessions") as progress:
                write_page, end = write()
                for page in pages:
                    total = page.total if listed == 0 else total
                    write_page(page)
                    listed, last = listed + len(page.sessions), page
                    progress.update(listed)
                    if self.stop.is_set():
                        break
        except InvalidPayload as exc:
            raise CommandError(str(exc), returncode=USAGE) from exc
        next_cursor = None if last is None else last.next_cursor
        end(total, next_cursor)
        if self.stop.is_set():
            self.progress(f"Stopped after {listed:,} sessions; --cursor continues.")

    def _write_list(self) -> Any:
        table = Table(SESSION_COLUMNS, width=self.width, colours=self.colours)

        def write_page(page: DirectoryPage) -> None:
            rows = [session_row(tenant, head) for tenant, head in page.sessions]
            self.write_text("\n".join(table.lines(rows)))

        def end(total: int | None, next_cursor: str | None) -> None:
            if total is not None:
                self.progress(f"{total:,} sessions match.")
            if next_cursor is not None:
                self.progress(f"More sessions follow: --cursor {next_cursor}")

        return write_page, end

    def _write_list_as_json(self) -> Any:
        """One object, written page by page."""
        # Not before the first page: the output is none if the database does not answer.
        separator = '{"sessions": ['

        def write_page(page: DirectoryPage) -> None:
            nonlocal separator
            for tenant, head in page.sessions:
                self.stdout.write(f"{separator}{json.dumps({'tenant': tenant, **head.to_dict()})}", ending="")
                separator = ", "

        def end(total: int | None, next_cursor: str | None) -> None:
            rest = json.dumps({"total": total, "next_cursor": next_cursor})
            self.write_text(f"{'' if separator == ', ' else separator}], {rest[1:]}")

        return write_page, end

    # --- show and tree

    def _add_show(self, parts: Any) -> None:
        parser = self.add_part(
            parts,
            "show",
            self._show,
            help="Show a session: its state, runs, sub-sessions, checkpoints, usage, and its conversation.",
            epilog="example: manage.py helix_sessions show trip-1 --messages 20",
        )
        parser.add_argument("session_id", metavar="ID")
        parser.add_argument(
            "--messages", type=at_least(1), metavar="N", help="Also print the newest N messages."
        )
        parser.add_argument(
            "--limit",
            type=at_least(1),
            default=10,
            help="At most so many runs and checkpoints (default: %(default)s).",
        )

    def _show(self, options: dict[str, Any]) -> None:
        session_id = options["session_id"]
        report = session_report(
            store_of(session_id, options), session_id, limit=options["limit"], messages=options["messages"]
        )
        if options["format"] == "json":
            self.write_text(json.dumps(report.to_dict()))
        else:
            sections = session_sections(report, width=self.width, colours=self.colours)
            self.write_text("\n\n".join(sections))
        if report.problems:
            raise CommandError("; ".join(report.problems), returncode=PROBLEMS_FOUND)

    def _add_tree(self, parts: Any) -> None:
        parser = self.add_part(
            parts,
            "tree",
            self._tree,
            help="Show a session and all sub-sessions below it, with the remote ones.",
            epilog="example: manage.py helix_sessions tree trip-1",
        )
        parser.add_argument("session_id", metavar="ID")
        parser.add_argument(
            "--from-root", action="store_true", help="Begin at the root of the tree that the session is in."
        )

    def _tree(self, options: dict[str, Any]) -> None:
        session_id = options["session_id"]
        store, directory = store_of(session_id, options), directory_of(options)
        tree = directory.tree(session_id, tenant=store.tenant)
        root_id = None if tree.head is None else tree.head.root_session_id
        if options["from_root"] and root_id not in (None, session_id):
            tree = directory.tree(str(root_id), tenant=store.tenant)
        if options["format"] == "json":
            self.write_text(json.dumps({"tenant": store.tenant, "nodes": _nodes(tree)}))
        else:
            self.write_text("\n".join(tree_lines(tree, width=self.width, colours=self.colours)))

    # --- changes

    def _add_set_status(self, parts: Any) -> None:
        parser = self.add_part(
            parts,
            "set-status",
            self._set_status,
            help="Set the status of a session, without a condition or only if it has an expected one.",
            epilog="example: manage.py helix_sessions set-status trip-1 failed --reason 'worker lost'",
        )
        parser.add_argument("session_id", metavar="ID")
        parser.add_argument("status", choices=_STATUSES)
        parser.add_argument("--reason", help="The failure reason (default: none).")
        parser.add_argument(
            "--expected",
            action="append",
            choices=_STATUSES,
            help="Only if the session has this status now; may be repeated.",
        )

    def _set_status(self, options: dict[str, Any]) -> None:
        session_id, status, reason = options["session_id"], options["status"], options["reason"]
        store = store_of(session_id, options)
        if options["expected"]:
            outcome = store.compare_and_set_status(
                session_id, options["expected"], status, failure_reason=reason
            )
            if isinstance(outcome, StatusConflict):
                raise CommandError(
                    f"The session is {outcome.current_status.value} at version {outcome.current_version}; "
                    "nothing was changed.",
                    returncode=PROBLEMS_FOUND,
                )
            version = outcome.new_version
        else:
            version = store.update_status(session_id, status, failure_reason=reason)
        data = {"tenant": store.tenant, "session_id": session_id, "status": status, "version": version}
        self.write_data(data, form=options["format"])

    def _add_interrupt(self, parts: Any) -> None:
        parser = self.add_part(
            parts,
            "interrupt",
            self._interrupt,
            help="Request that the current run of a session stops, in whichever process it runs.",
            epilog="example: manage.py helix_sessions interrupt trip-1 --reason 'costs too much'",
        )
        parser.add_argument("session_id", metavar="ID")
        parser.add_argument(
            "--abort", action="store_true", help="Stop for good (default: so that it can continue)."
        )
        parser.add_argument("--reason", help="Told to the run.")
        parser.add_argument("--run", dest="run_id", metavar="RUN", help="Only this run.")

    def _interrupt(self, options: dict[str, Any]) -> None:
        store = store_of(options["session_id"], options)
        request = store.request_interrupt(
            options["session_id"],
            kind="abort" if options["abort"] else "interrupt",
            reason=options["reason"],
            run_id=options["run_id"],
        )
        self.write_data({"tenant": store.tenant, **request.to_dict()}, form=options["format"])

    def _add_delete(self, parts: Any) -> None:
        parser = self.add_part(
            parts,
            "delete",
            self._delete,
            help="Delete a session with all its data and all sub-sessions below it.",
            epilog="example: manage.py helix_sessions delete trip-1 --no-input",
        )
        parser.add_argument("session_id", metavar="ID")
        parser.add_argument("--keep-usage", action="store_true", help="Keep the usage entries.")
        self.add_confirmation_argument(parser)

    def _delete(self, options: dict[str, Any]) -> None:
        session_id = options["session_id"]
        store = store_of(session_id, options)
        if options["interactive"]:
            tree = directory_of(options).tree(session_id, tenant=store.tenant)
            local = [node for _, node in tree.walk() if node.head is not None and not node.is_repeated]
            messages = sum(node.head.message_count for node in local if node.head is not None)
            question = (
                f"Delete the session {visible(session_id)} of the tenant '{visible(store.tenant)}': "
                f"{len(local):,} sessions with {messages:,} messages?"
            )
            self.confirm(question, is_interactive=True)
        deleted = store.delete_session(session_id, keep_usage=options["keep_usage"])
        if not deleted:
            raise SessionNotFound(session_id)
        data = {"tenant": store.tenant, "session_id": session_id, "deleted_sessions": deleted}
        self.write_data(data, form=options["format"])


def _nodes(tree: TreeNode) -> list[dict[str, Any]]:
    """The nodes of a tree from the top, each with its depth and the session above it."""
    above: list[str] = []
    nodes = []
    for way, node in tree.walk():
        del above[len(way) :]
        nodes.append(
            {
                "session_id": node.session_id,
                "depth": len(way),
                "above": above[-1] if above else None,
                "is_repeated": node.is_repeated,
                "session": None if node.head is None else node.head.to_dict(),
                "ref": None if node.ref is None else node.ref.to_dict(),
            }
        )
        above.append(node.session_id)
    return nodes


def _key_and_value(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    return key, value
