"""The action that settles an effect of which nobody knows whether it happened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from django import forms
from django.contrib.messages import constants as levels
from django.utils.text import format_lazy
from django.utils.translation import gettext_lazy as _

from helix_store.actions.answers import RepeatedKey, json_argument, json_value
from helix_store.actions.sessions import Outcome, SessionAction
from helix_store.exceptions import shown_id
from helix_store.models import Effect
from helix_store.stores import DatabaseStateStore

DONE: Final = "done"
NOT_DONE: Final = "not_done"

_LONGEST_ID: Final = 320
_LONGEST_RESULT: Final = 100_000
_SETTLED: Final = {DONE: _("it happened"), NOT_DONE: _("it did not happen")}


class SettleForm(forms.Form):
    effect_id = forms.CharField(widget=forms.HiddenInput, max_length=_LONGEST_ID, strip=False)
    outcome = forms.ChoiceField(
        label=_("What happened"), choices=[(DONE, _("It happened")), (NOT_DONE, _("It did not happen"))]
    )
    result = forms.CharField(
        label=_("Result, as JSON"),
        required=False,
        max_length=_LONGEST_RESULT,
        widget=forms.Textarea(attrs={"rows": 3, "spellcheck": "false"}),
    )

    not_named = ("outcome",)

    def clean_result(self) -> Any:
        text = self.cleaned_data["result"].strip()
        if not text or self.cleaned_data.get("outcome") != DONE:
            return None
        try:
            return json_value(text)
        except RepeatedKey as exc:
            raise forms.ValidationError(_("A key is repeated in this JSON.")) from exc
        except ValueError as exc:
            raise forms.ValidationError(_("This is not JSON.")) from exc


class Settle(SessionAction):
    """A decision by a user in the admin, or by the given ``actor``. It needs its own permission."""

    name = "settle"
    label = _("Settle")
    model = Effect
    permission = "settle"
    is_in_section = True
    form = SettleForm
    help = "Settle an effect of which nobody knows whether it happened."
    example = 'trip-1 call-2 done --result \'{"receipt": "A-17"}\''
    options = {
        "effect_id": {"metavar": "EFFECT", "help": "The id of the effect."},
        "outcome": {
            "choices": [DONE, NOT_DONE],
            "help": "done: it happened. not_done: it did not, so that the next turn attempts it again.",
        },
        "--result": {
            "type": json_argument,
            "metavar": "JSON",
            "help": "The result that the agent gets (default: null).",
        },
        "--as": {"dest": "user", "metavar": "USER", "help": "The name of the Django user who settles it."},
        "--actor": {"help": "Who settles it, if not a Django user: a string that is stored with the effect."},
    }

    def run(self, store: DatabaseStateStore, session_id: str, given: Mapping[str, Any]) -> Outcome:
        effect_id, outcome = given["effect_id"], given["outcome"]
        is_settled = store.settle_effect(
            session_id,
            effect_id,
            done=outcome == DONE,
            result=given.get("result") if outcome == DONE else None,
            actor=given.get("actor"),
        )
        return Outcome(
            message=(
                format_lazy(_("{effect}: {outcome}."), effect=shown_id(effect_id), outcome=_SETTLED[outcome])
                if is_settled
                else _("Nothing was done: the effect is decided already.")
            ),
            is_done=is_settled,
            level=levels.SUCCESS if is_settled else levels.WARNING,
            data={"session_id": session_id, "effect_id": effect_id, "outcome": outcome},
            problem=f"The effect {effect_id} is decided already; nothing was changed.",
        )


SETTLE: Final = Settle()
