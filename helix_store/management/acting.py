"""The base of commands that run actions: each action is a sub-command with its own options and question."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from django.core.management.base import CommandError

from helix_store.actions.action import SessionAction
from helix_store.exceptions import InvalidPayload, NotPermitted
from helix_store.management.base import PROBLEMS_FOUND, USAGE, StoreCommandWithParts
from helix_store.management.session_argument import chosen_session
from helix_store.management.text import visible
from helix_store.stores import DatabaseStateStore

__all__ = ["ActingCommand"]


class ActingCommand(StoreCommandWithParts):
    def add_action(self, parts: Any, action: SessionAction) -> None:
        """Add the sub-command of an action on a session."""
        name = action.command or action.name
        title = f"{self.__module__.rpartition('.')[2]} {name}"
        epilog = f"example: manage.py {title} {action.example}"
        parser = self.add_part(parts, name, partial(self._run, action), help=action.help, epilog=epilog)
        parser.add_argument("session_id", metavar="ID")
        for flag, settings in action.options.items():
            parser.add_argument(flag, **settings)
        if action.is_destructive:
            self.add_confirmation_argument(parser)

    def target(
        self, action: SessionAction, options: Mapping[str, Any], *, is_whole: bool
    ) -> tuple[DatabaseStateStore, str, Mapping[str, Any]]:
        """Return the store, the session id and the arguments that the options specify."""
        return *chosen_session(options["session_id"], options, is_whole=is_whole), options

    def act(
        self,
        action: SessionAction,
        store: DatabaseStateStore,
        session_id: str,
        given: Mapping[str, Any],
        *,
        is_interactive: bool = False,
    ) -> dict[str, Any]:
        """Ask first if ``is_interactive``, run the action and return its data. Raise `CommandError`."""
        if is_interactive:
            self.confirm(visible(action.preview(store, session_id, given)), is_interactive=True)
        try:
            outcome = action.run(store, session_id, given)
        except InvalidPayload as exc:
            raise CommandError(str(exc), returncode=USAGE) from exc
        except NotPermitted as exc:
            raise CommandError(str(exc), returncode=PROBLEMS_FOUND) from exc
        if not outcome.is_done:
            problem = visible(outcome.problem or str(outcome.message))
            raise CommandError(problem, returncode=PROBLEMS_FOUND)
        return {"tenant": store.tenant, **outcome.data}

    def _run(self, action: SessionAction, options: dict[str, Any]) -> None:
        is_interactive = options.get("interactive", False)
        is_whole = action.is_destructive and not is_interactive
        store, session_id, given = self.target(action, options, is_whole=is_whole)
        data = self.act(action, store, session_id, given, is_interactive=is_interactive)
        self.write_data(data, form=options["format"])
