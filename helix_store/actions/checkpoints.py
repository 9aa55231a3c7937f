"""Actions on the checkpoints of a session: rewind to one, branch from one, prune the oldest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from django import forms
from django.utils.text import format_lazy
from django.utils.translation import gettext_lazy as _

from helix_store.actions.action import Outcome, SessionAction
from helix_store.exceptions import CheckpointNotFound, shown_id
from helix_store.models import Checkpoint
from helix_store.reports.times import moment
from helix_store.stores import DatabaseStateStore

_LONGEST_ID: Final = 320


class CheckpointForm(forms.Form):
    checkpoint = forms.CharField(widget=forms.HiddenInput, max_length=_LONGEST_ID, strip=False)


class BranchForm(CheckpointForm):
    title = forms.CharField(
        label=_("Title of the new session"), required=False, max_length=200, empty_value=None
    )


class KeepForm(forms.Form):
    keep = forms.IntegerField(label=_("Checkpoints to keep"), min_value=0, max_value=1_000_000, initial=20)


class Restore(SessionAction):
    name = "restore"
    label = _("Restore")
    has_own_place = True
    form = CheckpointForm
    guard = "version"
    is_destructive = True
    warning = _("Later messages, later checkpoints and all staged changes of the session are deleted.")

    def preview(self, store: DatabaseStateStore, session_id: str, given: Mapping[str, Any]) -> str:
        found = store.get_checkpoint(session_id, given["checkpoint"])
        if found is None:
            raise CheckpointNotFound(given["checkpoint"])
        count = store.get_message_count(session_id)
        return (
            f"Rewind the session {session_id} of the tenant '{store.tenant}' to {found.step_id} of "
            f"{moment(found.created_at)}: {count - found.message_count:,} of {count:,} messages and every "
            "later checkpoint are deleted?"
        )

    def run(self, store: DatabaseStateStore, session_id: str, given: Mapping[str, Any]) -> Outcome:
        checkpoint_id = given["checkpoint"]
        version = store.restore_checkpoint(
            session_id, checkpoint_id, expected_version=given.get("expected_version")
        )
        return Outcome(
            message=format_lazy(
                _("Restored the checkpoint {checkpoint}. The session is at version {version}."),
                checkpoint=shown_id(checkpoint_id),
                version=version,
            ),
            data={"session_id": session_id, "checkpoint_id": checkpoint_id, "version": version},
        )


class Branch(SessionAction):
    name = "branch"
    label = _("Branch")
    has_own_place = True
    form = BranchForm

    def run(self, store: DatabaseStateStore, session_id: str, given: Mapping[str, Any]) -> Outcome:
        checkpoint_id = given["checkpoint"]
        state = store.branch_session(
            session_id,
            checkpoint_id,
            new_session_id=given.get("new_id"),
            message_index=given.get("message_index"),
            title=given.get("title"),
        )
        return Outcome(
            message=format_lazy(
                _("Branched a new session from the checkpoint {checkpoint}."),
                checkpoint=shown_id(checkpoint_id or ""),
            ),
            session_id=state.session_id,
            data={
                "session_id": state.session_id,
                "branched_from": session_id,
                "checkpoint_id": checkpoint_id,
                "message_count": state.message_count,
            },
        )


class PruneCheckpoints(SessionAction):
    name = "prune-checkpoints"
    label = _("Prune checkpoints")
    has_own_place = True
    model = Checkpoint
    permission = "delete"
    form = KeepForm
    is_destructive = True
    warning = _("The oldest checkpoints are deleted. The current state and the messages stay.")

    def run(self, store: DatabaseStateStore, session_id: str, given: Mapping[str, Any]) -> Outcome:
        count = store.prune_checkpoints(session_id, keep=given["keep"])
        return Outcome(
            message=format_lazy(_("Deleted {count} checkpoints."), count=count), data={"checkpoints": count}
        )


RESTORE: Final = Restore()
BRANCH: Final = Branch()
PRUNE_CHECKPOINTS: Final = PruneCheckpoints()
