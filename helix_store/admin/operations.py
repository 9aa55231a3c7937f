"""The code that runs an action for a request and adds an entry to the admin's log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.http import HttpRequest
from django.utils import translation

from helix_store.actions.action import Action, Outcome

__all__ = ["run"]

_LONGEST_TITLE: Final = 200


def run(
    request: HttpRequest, action: Action, row: Any, given: Mapping[str, Any], *, expected: str
) -> Outcome:
    """Run an action and log it in the same transaction. ``expected`` is the guard on the user's page."""
    model, key, title = (action.model, None, action.label) if row is None else (type(row), row.pk, str(row))
    flag = DELETION if action.permission == "delete" and type(row) is action.model else CHANGE

    def record(outcome: Outcome) -> None:
        with translation.override(None):
            LogEntry.objects.create(
                user_id=cast("int", request.user.pk),
                content_type=ContentType.objects.get_for_model(model),
                object_id=key,
                object_repr=str(title)[:_LONGEST_TITLE],
                action_flag=flag,
                change_message=str(outcome.message),
            )

    return action.perform(request.user, row, given, expected=expected, record=record)
