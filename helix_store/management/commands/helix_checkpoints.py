"""``helix_checkpoints``: list, read and compare checkpoints; restore, branch and prune."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from typing import Any, Final

from django.core.management.base import CommandError

from helix_store.core import moments
from helix_store.exceptions import InvalidPayload
from helix_store.management.base import USAGE, StoreCommandWithParts, at_least
from helix_store.management.checkpoint_argument import (
    CHECKPOINT_FORMS,
    ChosenState,
    chosen_checkpoint,
    chosen_state,
)
from helix_store.management.output import Style, moment, pairs, table
from helix_store.management.session_argument import directory_of, store_of
from helix_store.management.session_page import CHECKPOINT_COLUMNS, checkpoint_row, json_lines
from helix_store.management.text import cut, visible
from helix_store.management.times import age_in_days
from helix_store.sessions.comparison import changes_between, comparable
from helix_store.sessions.directory import PruneSummary

__all__ = ["Command"]

_STYLES: Final[dict[str, Style]] = {"+": "green", "-": "red", "@": "cyan"}


class Command(StoreCommandWithParts):
    help = "List, read and compare the checkpoints of sessions; restore, branch and prune."

    def add_parts(self, parts: Any) -> None:
        self._add_list(parts)
        self._add_show(parts)
        self._add_diff(parts)
        self._add_restore(parts)
        self._add_branch(parts)
        self._add_prune(parts)

    def _add_list(self, parts: Any) -> None:
        parser = self.add_part(
            parts,
            "list",
            self._list,
            help="List the checkpoints of a session, newest first.",
            epilog="example: manage.py helix_checkpoints list trip-1",
        )
        parser.add_argument("session_id", metavar="SESSION")
        parser.add_argument(
            "--limit", type=at_least(1), default=20, help="At most so many, up to 200 (default: %(default)s)."
        )
        parser.add_argument("--cursor", help="Continue after a list of the same session.")

    def _list(self, options: dict[str, Any]) -> None:
        store = store_of(options["session_id"], options)
        page = store.list_checkpoints(options["session_id"], limit=options["limit"], cursor=options["cursor"])
        if options["format"] == "json":
            data = {"tenant": store.tenant, "session_id": options["session_id"], **page.to_dict()}
            self.write_text(json.dumps(data))
            return
        rows = [checkpoint_row(item) for item in page.items]
        self.write_text(table(CHECKPOINT_COLUMNS, rows, width=self.width, colours=self.colours))
        if page.next_cursor is not None:
            self.progress(
                f"{len(page.items):,} of {page.total:,} checkpoints; more follow: --cursor {page.next_cursor}"
            )

    def _add_show(self, parts: Any) -> None:
        parser = self.add_part(
            parts,
            "show",
            self._show,
            help="Show a checkpoint and its state.",
            epilog="example: manage.py helix_checkpoints show trip-1@latest",
        )
        parser.add_argument("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT_FORMS)

    def _show(self, options: dict[str, Any]) -> None:
        store, found = chosen_checkpoint(options["checkpoint"], options)
        if options["format"] == "json":
            self.write_text(json.dumps({"tenant": store.tenant, **found.to_dict()}))
            return
        values = {
            "checkpoint": found.checkpoint_id,
            "session": found.session_id,
            "tenant": store.tenant,
            "run": found.run_id,
            "step": f"{found.step_id}, {found.step_count:,} steps",
            "status": found.status.value,
            "messages": f"{found.message_count:,}",
            "stream": f"sequence {found.stream_sequence:,}",
            "created": moment(found.created_at, seconds=True),
        }
        self.write_text(pairs(values.items(), width=self.width, colours=self.colours))
        # Tracing contexts may hold keys of vendors: only --format json has them.
        state = {name: value for name, value in comparable(found.state).items() if name != "tracing_context"}
        shown = {name: value for name, value in state.items() if value not in (None, {}, [], "")}
        self.write_text("\n".join(["", *json_lines(shown, width=self.width, indent="")]))

    def _add_diff(self, parts: Any) -> None:
        parser = self.add_part(
            parts,
            "diff",
            self._diff,
            help="Compare the states of two checkpoints, of one session or of two.",
            epilog="example: manage.py helix_checkpoints diff trip-1@latest~1 trip-1@latest",
        )
        forms = CHECKPOINT_FORMS + " SESSION@current is the current state."
        parser.add_argument("a", metavar="A", help=forms)
        parser.add_argument("b", metavar="B")

    def _diff(self, options: dict[str, Any]) -> None:
        before, after = chosen_state(options["a"], options), chosen_state(options["b"], options)
        old, new = comparable(before.state), comparable(after.state)
        if options["format"] == "json":
            changes = [change.to_dict() for change in changes_between(old, new)]
            data = {"a": before.to_dict(), "b": after.to_dict(), "changes": changes}
            self.write_text(json.dumps(data))
            return
        old.pop("tracing_context", None)
        new.pop("tracing_context", None)
        lines = [_heading("---", before), _heading("+++", after), *_difference(old, new)]
        self.write_text("\n".join(self._coloured(line) for line in lines))

    def _coloured(self, line: str) -> str:
        text = line if self.width is None else cut(line, self.width)
        style = _STYLES.get(line[:1])
        return text if style is None else self.colours(text, style)

    def _add_restore(self, parts: Any) -> None:
        parser = self.add_part(
            parts,
            "restore",
            self._restore,
            help="Rewind a session to a checkpoint; later checkpoints, messages and staged changes go.",
            epilog="example: manage.py helix_checkpoints restore trip-1@latest~1 --no-input",
        )
        parser.add_argument("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT_FORMS)
        parser.add_argument(
            "--expected-version",
            type=at_least(1),
            metavar="N",
            help="Only if the session is at this version.",
        )
        self.add_confirmation_argument(parser)

    def _restore(self, options: dict[str, Any]) -> None:
        store, found = chosen_checkpoint(options["checkpoint"], options)
        if options["interactive"]:
            count = store.get_message_count(found.session_id)
            question = (
                f"Rewind the session {visible(found.session_id)} of the tenant '{visible(store.tenant)}' to "
                f"{visible(found.step_id)} of {moment(found.created_at)}: {count - found.message_count:,} of "
                f"{count:,} messages and every later checkpoint are deleted?"
            )
            self.confirm(question, is_interactive=True)
        version = store.restore_checkpoint(
            found.session_id, found.checkpoint_id, expected_version=options["expected_version"]
        )
        data = {
            "tenant": store.tenant,
            "session_id": found.session_id,
            "checkpoint_id": found.checkpoint_id,
            "version": version,
            "message_count": found.message_count,
        }
        self.write_data(data, form=options["format"])

    def _add_branch(self, parts: Any) -> None:
        parser = self.add_part(
            parts,
            "branch",
            self._branch,
            help="Start a new session from a checkpoint, or with the first messages of a session.",
            epilog="example: manage.py helix_checkpoints branch trip-1@latest~1 --new-id trip-1-again",
        )
        parser.add_argument(
            "checkpoint",
            metavar="CHECKPOINT",
            help=CHECKPOINT_FORMS + " With --message-index it is a session id.",
        )
        parser.add_argument("--new-id", metavar="ID", help="Id of the new session (default: a new one).")
        parser.add_argument("--title", help="Title of the new session.")
        parser.add_argument(
            "--message-index",
            type=at_least(0),
            metavar="N",
            help="Branch with the first N messages and the newest checkpoint within them.",
        )

    def _branch(self, options: dict[str, Any]) -> None:
        if options["message_index"] is None:
            store, found = chosen_checkpoint(options["checkpoint"], options)
            session_id, checkpoint_id = found.session_id, found.checkpoint_id
        else:
            session_id, checkpoint_id = options["checkpoint"], None
            store = store_of(session_id, options)
        try:
            state = store.branch_session(
                session_id,
                checkpoint_id,
                new_session_id=options["new_id"],
                message_index=options["message_index"],
                title=options["title"],
            )
        except InvalidPayload as exc:
            raise CommandError(str(exc), returncode=USAGE) from exc
        data = {
            "tenant": store.tenant,
            "session_id": state.session_id,
            "branched_from": session_id,
            "checkpoint_id": checkpoint_id,
            "message_count": state.message_count,
        }
        self.write_data(data, form=options["format"])

    def _add_prune(self, parts: Any) -> None:
        parser = self.add_part(
            parts,
            "prune",
            self._prune,
            help="Delete all but the newest checkpoints of each session, or of one. The current state stays.",
            epilog="example: manage.py helix_checkpoints prune --keep 20 --older-than 30 --dry-run",
        )
        parser.add_argument("session_id", metavar="SESSION", nargs="?", help="Only this session.")
        parser.add_argument(
            "--keep", type=at_least(0), required=True, metavar="N", help="Keep the newest N of each session."
        )
        parser.add_argument(
            "--older-than", type=age_in_days, metavar="DAYS", help="Delete only checkpoints older than this."
        )
        parser.add_argument("--dry-run", action="store_true", help="Only count what would be deleted.")

    def _prune(self, options: dict[str, Any]) -> None:
        age, session_id = options["older_than"], options["session_id"]
        directory = directory_of(options)
        if session_id is not None:
            options = {**options, "tenant": store_of(session_id, options).tenant}
            directory = directory_of(options)
        summary = PruneSummary()
        sums = directory.prune_checkpoints(
            keep=options["keep"],
            before=None if age is None else moments.now() - age,
            session_id=session_id,
            dry_run=options["dry_run"],
        )
        with self.progress_bar("sessions") as progress:
            for so_far in sums:
                summary = so_far
                progress.advance()
                if self.stop.is_set():
                    break
        if self.stop.is_set():
            self.progress(f"Stopped after {progress.done:,} sessions; run it again to continue.")
        self.write_data({**summary.to_dict(), "dry_run": options["dry_run"]}, form=options["format"])


def _heading(mark: str, chosen: ChosenState) -> str:
    name = chosen.checkpoint_id or f"{chosen.session_id}@current"
    facts = f"{chosen.message_count:,} messages, {moment(chosen.created_at, seconds=True)}"
    return f"{mark} {visible(name)}  {facts}"


def _difference(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """The lines of a unified diff, without its headings."""
    old, new = _document(before), _document(after)
    difference = difflib.unified_diff(old, new, n=3, lineterm="")
    for number, line in enumerate(difference):
        if number > 1:
            yield visible(line)


def _document(state: dict[str, Any]) -> list[str]:
    return json.dumps(state, indent=2, ensure_ascii=False, sort_keys=True).split("\n")
