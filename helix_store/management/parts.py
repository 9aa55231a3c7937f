"""The base classes of commands with sub-commands, which may be actions with options and a question."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from django.core.management.base import CommandError, CommandParser, DjangoHelpFormatter

from helix_store.actions.action import SessionAction
from helix_store.management.base import StoreCommand, add_output_arguments
from helix_store.management.session_argument import chosen_session
from helix_store.management.text import visible
from helix_store.stores import DatabaseStateStore


class StoreCommandWithParts(StoreCommand):
    """A command with sub-commands. The common options may come before or after its name."""

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        self.add_tenant_argument(parser)
        self.add_wide_argument(parser)
        self._parts = parser.add_subparsers(dest="part", required=True, metavar="sub-command")
        self.add_parts()

    def add_parts(self) -> None:
        raise NotImplementedError

    def add_part(
        self, name: str, run: Callable[[dict[str, Any]], None], *, example: str, help: str | None = None
    ) -> CommandParser:
        """Add a sub-command. It calls ``run`` with the parsed options; the default help is the docstring of
        ``run``.
        """
        title = f"{type(self).__module__.rpartition('.')[2]} {name}"
        parser: CommandParser = self._parts.add_parser(
            name,
            help=help or run.__doc__,
            description=help or run.__doc__,
            epilog=f"example: manage.py {title} {example}".rstrip(),
            parents=[self._common_arguments()],
            formatter_class=DjangoHelpFormatter,
        )
        parser.set_defaults(run=run)
        return parser

    def handle(self, *args: Any, **options: Any) -> None:
        options["run"](options)

    def _common_arguments(self) -> CommandParser:
        """Return the options of the command itself. They keep their values unless they are given again."""
        parser = CommandParser(add_help=False)
        add_output_arguments(parser)
        self.add_tenant_argument(parser)
        self.add_wide_argument(parser)
        parser.add_argument("-v", "--verbosity", type=int, choices=[0, 1, 2, 3], help="0 is silent.")
        for name in ("--no-color", "--force-color", "--traceback", "--skip-checks"):
            parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
        for name in ("--settings", "--pythonpath"):
            parser.add_argument(name, help=argparse.SUPPRESS)
        for action in parser._actions:
            action.default = argparse.SUPPRESS
        return parser


class ActingCommand(StoreCommandWithParts):
    def add_action(self, action: SessionAction) -> None:
        """Add the sub-command of an action on a session."""
        name, run = action.command or action.name, partial(self._run, action)
        parser = self.add_part(name, run, help=action.help, example=action.example)
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
        """Ask first if ``is_interactive``, run the action, and return its data. Raise `CommandError`."""
        if is_interactive:
            self.confirm(visible(action.preview(store, session_id, given)))
        outcome = action.run(store, session_id, given)
        if not outcome.is_done:
            raise CommandError(visible(outcome.problem or str(outcome.message)))
        return {"tenant": store.tenant, **outcome.data}

    def _run(self, action: SessionAction, options: dict[str, Any]) -> None:
        is_interactive = options.get("interactive", False)
        is_whole = action.is_destructive and not is_interactive
        store, session_id, given = self.target(action, options, is_whole=is_whole)
        data = self.act(action, store, session_id, given, is_interactive=is_interactive)
        self.write_data(data)
