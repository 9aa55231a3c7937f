"""``helix_erase``: erase a user, a session or a tenant, and print the receipt."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser

from helix_store.cleanup.erasure import Erasure
from helix_store.cleanup.receipt import ErasureReceipt
from helix_store.exceptions import InvalidPayload, InvalidQuery
from helix_store.management.base import PROBLEMS_FOUND, USAGE, StoreCommand
from helix_store.management.output import Column, cell, pairs, table

__all__ = ["Command"]

_SUBJECTS = ("user", "session", "tenant")
_FLAGS = ("keep_branches", "leave_snapshots", "force")


class Command(StoreCommand):
    help = (
        "Erase a user, a session or a whole tenant: sessions with all their data, their branches, streams, "
        "locks, usage and workspace snapshots. Prints a receipt with numbers of rows, which can be stored. "
        "Safe to repeat, and to stop at any time."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        subject = parser.add_mutually_exclusive_group()
        subject.add_argument("--user", metavar="ID", help="Erase this user, in every tenant or in --tenant.")
        subject.add_argument("--session", metavar="ID", help="Erase this session, its tree and its branches.")
        parser.add_argument(
            "--tenant",
            help="Only this tenant; without --user and --session, erase everything in the tenant.",
        )
        parser.add_argument("--dry-run", action="store_true", help="Only count what would be erased.")
        parser.add_argument("--no-input", action="store_true", help="Do not ask.")
        parser.add_argument(
            "--keep-branches",
            action="store_true",
            help="Keep sessions that were branched from erased ones, with their copies.",
        )
        parser.add_argument(
            "--leave-snapshots", action="store_true", help="Do not delete workspace snapshots."
        )
        parser.add_argument(
            "--force", action="store_true", help="Also erase sessions in use: locked, running or streaming."
        )
        parser.epilog = "example: manage.py helix_erase --user user-1 --dry-run"

    def handle(self, *args: Any, **options: Any) -> None:
        if all(options[name] is None for name in _SUBJECTS):
            raise CommandError("Pass --user, --session or --tenant.", returncode=USAGE)
        if options["dry_run"]:
            self._write(self._run(self._erasure(options, dry_run=True)), options)
            return
        if not options["no_input"]:
            self._ask(self._run(self._erasure(options, dry_run=True)), options)
            if self.stop.is_set():
                raise CommandError("Stopped; nothing was erased.", returncode=PROBLEMS_FOUND)
        erasure = self._erasure(options, dry_run=False)
        self._write(self._run(erasure), options)
        for key, reason in erasure.left:
            tenant = f" of tenant {cell(key.tenant)}" if key.tenant else ""
            self.progress(f"Left session {cell(key.session_id)}{tenant}: {reason}.")
        receipt = erasure.receipt
        if self.stop.is_set() and receipt.finished_at is None:
            self.progress(f"Stopped after {receipt.trees} session trees; run it again to continue.")
        if not receipt.complete:
            raise CommandError(
                "The erasure is not complete; run it again when nothing is in use.", returncode=PROBLEMS_FOUND
            )

    def _erasure(self, options: dict[str, Any], *, dry_run: bool) -> Erasure:
        try:
            return Erasure(
                using=options["database"],
                user_id=options["user"],
                session_id=options["session"],
                tenant=options["tenant"],
                dry_run=dry_run,
                **{flag: options[flag] for flag in _FLAGS},
            )
        except (ImproperlyConfigured, InvalidQuery, InvalidPayload) as exc:
            raise CommandError(str(exc), returncode=USAGE) from exc

    def _run(self, erasure: Erasure) -> ErasureReceipt:
        with self.progress_bar("session trees") as progress:
            try:
                for receipt in erasure.batches():
                    progress.update(receipt.trees)
                    if self.stop.is_set():
                        break
            except InvalidQuery as exc:
                raise CommandError(str(exc), returncode=USAGE) from exc
        return erasure.receipt

    def _ask(self, said: ErasureReceipt, options: dict[str, Any]) -> None:
        subject = next(name for name in _SUBJECTS if options[name] is not None)
        rows = sum(said.deleted.values())
        self.confirm(
            f"This erases {said.trees} session trees, {rows} rows in all, of the {subject} "
            f"{cell(options[subject])!r} in the database {options['database']!r}. It cannot be undone.",
            is_interactive=True,
        )

    def _write(self, receipt: ErasureReceipt, options: dict[str, Any]) -> None:
        data = receipt.to_dict()
        if options["format"] == "json":
            self.write_data(data, form="json")
            return
        rows = [
            (name, change, f"{count:,}")
            for change in ("deleted", "changed")
            for name, count in data.pop(change).items()
        ]
        columns = [Column(heading="table"), Column(heading="change"), Column(heading="rows", right=True)]
        if rows:
            self.write_text(f"{table(columns, rows, width=self.width, colours=self.colours)}\n\n")
        shown = ((name.replace("_", " "), value) for name, value in data.items())
        self.write_text(pairs(shown, width=self.width, colours=self.colours))
