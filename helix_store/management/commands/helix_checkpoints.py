"""``helix_checkpoints``: list, show, compare, restore, branch and prune checkpoints."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from itertools import islice
from operator import attrgetter
from typing import Any, Final

from helix_store.actions.sessions import BRANCH, RESTORE
from helix_store.management.base import (
    CHECKPOINT_FORMS,
    ActingCommand,
    ChosenState,
    at_least,
    chosen_checkpoint,
    chosen_session,
    chosen_state,
    directory_of,
)
from helix_store.management.output import Style, moment_of, pairs, time_or_age, visible
from helix_store.management.session_page import CHECKPOINT_COLUMNS, json_lines
from helix_store.reports.payloads import changes_between, comparable, moment, project_zone, shown_state
from helix_store.stores.directory import PruneSummary

_STYLES: Final[dict[str, Style]] = {"+": "green", "-": "red", "@": "cyan"}


class Command(ActingCommand):
    help = "List, read and compare the checkpoints of sessions; restore, branch and prune."

    def add_parts(self) -> None:
        parser = self.add_part("list", self._list, example="trip-1")
        parser.add_argument("session_id", metavar="SESSION")
        parser.add_argument(
            "--limit",
            type=at_least(1),
            default=20,
            help="At most this many, 1 to 200 (default: %(default)s).",
        )
        parser.add_argument("--cursor", help="Continue a list of the same session at its next_cursor.")

        parser = self.add_part("show", self._show, example="trip-1@latest")
        parser.add_argument("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT_FORMS)

        parser = self.add_part("diff", self._diff, example="trip-1@latest~1 trip-1@latest")
        forms = CHECKPOINT_FORMS + " SESSION@current is the current state."
        parser.add_argument("a", metavar="A", help=forms)
        parser.add_argument("b", metavar="B")

        parser = self.add_part("restore", self._restore, example="trip-1@latest~1 --no-input")
        parser.add_argument("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT_FORMS)
        parser.add_argument(
            "--expected-version",
            type=at_least(1),
            metavar="N",
            help="Restore only if the session is at this version.",
        )
        self.add_confirmation_argument(parser)

        parser = self.add_part("branch", self._branch, example="trip-1@latest~1 --new-id trip-1-again")
        parser.add_argument(
            "checkpoint",
            metavar="CHECKPOINT",
            help=CHECKPOINT_FORMS + " With --message-index, it is a session id.",
        )
        parser.add_argument("--new-id", metavar="ID", help="Id of the new session (default: a new one).")
        parser.add_argument("--title", help="Title of the new session.")
        parser.add_argument(
            "--message-index",
            type=at_least(0),
            metavar="N",
            help="Branch with the first N messages and the newest checkpoint within them.",
        )

        parser = self.add_part("prune", self._prune, example="--keep 20 --older-than 30d --dry-run")
        parser.add_argument("session_id", metavar="SESSION", nargs="?", help="Only this session.")
        parser.add_argument(
            "--keep", type=at_least(0), required=True, metavar="N", help="Keep the newest N of each session."
        )
        parser.add_argument(
            "--older-than",
            type=time_or_age,
            metavar="TIME",
            help="Delete only checkpoints from before this date or age, such as 30d.",
        )
        parser.add_argument("--dry-run", action="store_true", help="Only count what would be deleted.")

    def _list(self, options: dict[str, Any]) -> None:
        """List the checkpoints of a session, newest first."""
        store, session_id = chosen_session(options["session_id"], options)
        page = store.list_checkpoints(session_id, limit=options["limit"], cursor=options["cursor"])
        if self.is_json:
            data = {"tenant": store.tenant, "session_id": session_id, **page.to_dict()}
            self.write_text(json.dumps(data))
            return
        self.write_table(CHECKPOINT_COLUMNS, page.items)
        if page.next_cursor is not None:
            self.progress(
                f"{len(page.items):,} of {page.total:,} checkpoints; more follow: --cursor {page.next_cursor}"
            )

    def _show(self, options: dict[str, Any]) -> None:
        """Show a checkpoint and its state."""
        store, found = chosen_checkpoint(options["checkpoint"], options)
        if self.is_json:
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
        self.write_text(pairs(values.items(), self.layout))
        # Only --format json includes the tracing context.
        state = shown_state(found.state)
        shown = {name: value for name, value in state.items() if value not in (None, {}, [], "")}
        self.write_text("\n".join(["", *json_lines(shown, self.layout, indent="")]))

    def _diff(self, options: dict[str, Any]) -> None:
        """Compare the states of two checkpoints, of the same session or of two sessions."""
        before, after = chosen_state(options["a"], options), chosen_state(options["b"], options)
        if self.is_json:
            old, new = comparable(before.state), comparable(after.state)
            changes = [change.to_dict() for change in changes_between(old, new)]
            data = {"a": before.to_dict(), "b": after.to_dict(), "changes": changes}
            self.write_text(json.dumps(data))
            return
        difference = _difference(shown_state(before.state), shown_state(after.state))
        lines = [_heading("---", before), _heading("+++", after), *difference]
        layout = self.layout
        shown = (layout.coloured(layout.fitted(line), _STYLES.get(line[:1])) for line in lines)
        self.write_text("\n".join(shown))

    def _restore(self, options: dict[str, Any]) -> None:
        """Rewind a session to a checkpoint, deleting later checkpoints, messages and staged changes."""
        is_whole = not options["interactive"]
        store, found = chosen_checkpoint(options["checkpoint"], options, is_whole=is_whole)
        data = self.act(
            RESTORE,
            store,
            found.session_id,
            {**options, "checkpoint": found.checkpoint_id},
            is_interactive=options["interactive"],
        )
        self.write_data({**data, "message_count": found.message_count})

    def _branch(self, options: dict[str, Any]) -> None:
        """Start a new session from a checkpoint, or with the first messages of a session."""
        if options["message_index"] is None:
            store, found = chosen_checkpoint(options["checkpoint"], options)
            session_id, checkpoint_id = found.session_id, found.checkpoint_id
        else:
            store, session_id = chosen_session(options["checkpoint"], options)
            checkpoint_id = None
        data = self.act(BRANCH, store, session_id, {**options, "checkpoint": checkpoint_id})
        self.write_data(data)

    def _prune(self, options: dict[str, Any]) -> None:
        """Delete all but the newest checkpoints of each session, or of one. The current state is kept."""
        self.look_for_tenant(options)
        older_than, session_id = options["older_than"], options["session_id"]
        directory = directory_of(options)
        if session_id is not None:
            # The command does not ask, so a script may repeat it.
            is_whole = not options["dry_run"]
            store, session_id = chosen_session(session_id, options, is_whole=is_whole)
            directory = directory_of({**options, "tenant": store.tenant})
        sums = directory.prune_checkpoints(
            keep=options["keep"],
            before=None if older_than is None else moment_of(older_than, project_zone()),
            session_id=session_id,
            dry_run=options["dry_run"],
        )
        summary = self.run_batches(sums, PruneSummary(), unit="sessions", done=attrgetter("sessions"))
        if self.stop.is_set():
            self.progress(f"Stopped after {summary.sessions:,} sessions; run it again to continue.")
        self.write_data({**summary.to_dict(), "dry_run": options["dry_run"]})


def _heading(mark: str, chosen: ChosenState) -> str:
    state = chosen.state
    name = chosen.checkpoint_id or f"{state.session_id}@current"
    facts = f"{state.message_count:,} messages, {moment(state.updated_at, seconds=True)}"
    return f"{mark} {visible(name)}  {facts}"


def _difference(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a unified diff, without its headings."""
    difference = difflib.unified_diff(_document(before), _document(after), n=3, lineterm="")
    yield from map(visible, islice(difference, 2, None))


def _document(state: dict[str, Any]) -> list[str]:
    return json.dumps(state, indent=2, ensure_ascii=False, sort_keys=True).split("\n")
