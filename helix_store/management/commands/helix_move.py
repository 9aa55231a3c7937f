"""``helix_move``: move a tenant to another database."""

from __future__ import annotations

from typing import Any, Final

from django.core.management.base import CommandError, CommandParser

from helix_store.engine.database import Database
from helix_store.exceptions import InvalidQuery
from helix_store.management.base import StoreCommand, add_format_argument
from helix_store.transfer.moves import MoveSummary, TenantMove, find_move, require_rows

_NEXT: Final = {
    "copying": "Run it again to continue, or with --abort to return.",
    "fenced": "Writers are refused. Run it again to continue, or with --abort to return.",
    "copied": "Change the project's router so that it places the tenant in {target!r}. Then run --finish.",
    "deleting": "Run --finish again to delete the rest.",
    "moved": "Run --release once no process uses the router's old answer.",
    "aborting": "Run --abort again to delete the rest of the copy.",
    "none": "The tenant is in one database.",
}


class Command(StoreCommand):
    help = (
        "Move a tenant to another database of the project. Once its rows are copied, its writers get "
        "TenantMoved, which is retryable, until the router places the tenant there. Safe to repeat after a "
        "stop or a kill at any point."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "tenant", metavar="TENANT", help="The tenant; without other options, show the phase of its move."
        )
        step = parser.add_mutually_exclusive_group()
        step.add_argument("--to", metavar="ALIAS", help="Copy the tenant to this database, and compare.")
        step.add_argument(
            "--finish", action="store_true", help="After the router was changed: delete it from the source."
        )
        step.add_argument(
            "--abort", action="store_true", help="Before the router is changed: delete the copy, and return."
        )
        step.add_argument(
            "--release", action="store_true", help="After --finish: stop refusing writers at the source."
        )
        parser.add_argument(
            "--from",
            "--database",
            dest="database",
            metavar="ALIAS",
            help="The database that has the tenant now (default: the one that the router names).",
        )
        parser.add_argument(
            "--force",
            action="store_true",
            help="Do not ask the router: the project passes using= itself. An abort does not compare, and "
            "works even if the target cannot be reached.",
        )
        add_format_argument(parser)
        parser.epilog = "example: manage.py helix_move acme"

    def handle(self, *args: Any, **options: Any) -> None:
        summary = self._run(options)
        self.write_data(summary.to_dict())
        for problem in summary.problems:
            self.progress(problem)
        self.progress(_NEXT[summary.phase].format(target=summary.target))
        if summary.problems or summary.phase in ("copying", "fenced", "deleting", "aborting"):
            raise CommandError("The move is not complete.")

    def _run(self, options: dict[str, Any]) -> MoveSummary:
        tenant, found = options["tenant"], find_move(options["tenant"])
        step = next((name for name in ("finish", "abort", "release") if options[name]), None)
        if options["to"] is None:
            if found is None and step is None:
                require_rows(Database(options["database"], tenant))
                return MoveSummary(tenant, options["database"], "", "none")
            if found is None:
                raise InvalidQuery("The tenant is not being moved. Begin with --to ALIAS.", path="tenant")
            source, target = found.source, found.target
        else:
            # The router may have been asked in the wrong phase, but a move that has begun knows its source.
            is_begun = found is not None and found.phase != "moved"
            source, target = found.source if found and is_begun else options["database"], options["to"]
        move = TenantMove(
            tenant,
            source,
            target,
            force=options["force"],
            progress=self.progress,
            is_stopped=self.stop.is_set,
        )
        if options["to"] is not None:
            return move.copy()
        if step is None:
            return MoveSummary(tenant, source, target, found.phase if found else "none")
        summary: MoveSummary = getattr(move, step)()
        return summary
