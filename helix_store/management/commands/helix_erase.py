"""``helix_erase``: erase a user, a session or a tenant, and print the receipt."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from django.core.management.base import CommandError, CommandParser

from helix_store.cleanup.erasure import Erasure
from helix_store.cleanup.workspaces import ErasureReceipt
from helix_store.management.base import StoreCommand, WrongUsage
from helix_store.management.output import Column, cell

_SUBJECTS = ("user", "session", "tenant")
_COLUMNS = (Column("table"), Column("change"), Column("rows", right=True))
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
        self.add_confirmation_argument(parser)
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

    def execute(self, *args: Any, **options: Any) -> str | None:
        self._has_found = False
        result = super().execute(*args, **options)
        if not self._has_found:
            # With several databases, the subject may be stored in only some of them.
            raise CommandError(f"{self._nothing} Nothing was erased.")
        return result

    def handle(self, *args: Any, **options: Any) -> None:
        if all(options[name] is None for name in _SUBJECTS):
            raise WrongUsage("Pass --user, --session or --tenant.")
        subject = next(name for name in _SUBJECTS if options[name] is not None)
        tenant = "" if options["tenant"] is None else f" of tenant {cell(options['tenant'])!r}"
        self._nothing = (
            f"Nothing is stored for the {subject} {cell(options[subject])!r}"
            f"{'' if subject == 'tenant' else tenant} in the database {options['database']!r}."
        )
        if options["dry_run"]:
            self._write_found(self._run(self._erasure(options, dry_run=True)))
            return
        if options["interactive"]:
            found = self._run(self._erasure(options, dry_run=True))
            if found.is_empty and not self.stop.is_set():
                self.progress(self._nothing)
                return
            self._has_found = True
            self._ask(found, options)
            if self.stop.is_set():
                raise CommandError("Stopped; nothing was erased.")
        erasure = self._erasure(options, dry_run=False)
        self._write_found(self._run(erasure))
        for key, reason in erasure.left:
            tenant = f" of tenant {cell(key.tenant)}" if key.tenant else ""
            self.progress(f"Left session {cell(key.session_id)}{tenant}: {reason}.")
        receipt = erasure.receipt
        if self.stop.is_set() and receipt.finished_at is None:
            self.progress(f"Stopped after {receipt.trees} session trees; run it again to continue.")
        if not receipt.complete:
            raise CommandError("The erasure is not complete; run it again when nothing is in use.")

    def _erasure(self, options: dict[str, Any], *, dry_run: bool) -> Erasure:
        return Erasure(
            using=options["database"],
            user_id=options["user"],
            session_id=options["session"],
            tenant=options["tenant"],
            dry_run=dry_run,
            **{flag: options[flag] for flag in _FLAGS},
        )

    def _run(self, erasure: Erasure) -> ErasureReceipt:
        self.run_batches(erasure.batches(), erasure.receipt, unit="session trees", done=attrgetter("trees"))
        return erasure.receipt

    def _ask(self, said: ErasureReceipt, options: dict[str, Any]) -> None:
        subject = next(name for name in _SUBJECTS if options[name] is not None)
        rows = sum(said.deleted.values())
        self.confirm(
            f"This erases {said.trees} session trees, {rows} rows in all, of the {subject} "
            f"{cell(options[subject])!r} in the database {options['database']!r}. It cannot be undone."
        )

    def _write_found(self, receipt: ErasureReceipt) -> None:
        """Write the receipt, unless nobody was erased: a receipt would say that somebody was."""
        if receipt.is_empty and receipt.finished_at is not None and not self._has_found:
            self.progress(self._nothing)
            return
        self._has_found = True
        self._write(receipt)

    def _write(self, receipt: ErasureReceipt) -> None:
        data = receipt.to_dict()
        if self.is_json:
            self.write_data(data)
            return
        rows = [
            (name, change, f"{count:,}")
            for change in ("deleted", "changed")
            for name, count in data.pop(change).items()
        ]
        if rows:
            self.write_table(_COLUMNS, rows)
            self.write_text("\n")
        self.write_data(data)
