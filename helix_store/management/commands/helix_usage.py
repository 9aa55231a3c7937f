"""``helix_usage``: report what agents have spent, by session, model, user or day, and from which budgets."""

from __future__ import annotations

import csv
import io
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final
from zoneinfo import ZoneInfo

from django.core.management.base import CommandParser

from helix_store.core.usage import UsageReport, UsageReportGrouping
from helix_store.management.base import StoreCommand, WrongUsage, add_named_argument, at_least, refuse_options
from helix_store.management.output import moment_of, time_or_age, visible
from helix_store.management.session_page import budgets_table, days_table, groups_table
from helix_store.reports.payloads import project_zone
from helix_store.reports.session import all_reports
from helix_store.usage.store import csv_rows, time_zone, usage_report

_NOT_FOR_BUDGETS: Final = ("since", "until", "zone", "agent_type", "user", "model", "limit", "csv")
_STOPPED: Final = "Stopped before the usage was added up; nothing was changed."


class Command(StoreCommand):
    help = (
        "Report tokens and costs by session, tree, model, agent type, user or day. The highest costs come "
        "first; days are in order, with bars. Or list the budgets."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        self.add_tenant_argument(parser)
        self.add_wide_argument(parser)
        parser.epilog = "example: manage.py helix_usage --by model --since 7d"
        parser.add_argument(
            "--by",
            type=_grouping,
            choices=[grouping.value for grouping in UsageReportGrouping],
            default=UsageReportGrouping.DAY.value,
            help="The grouping of the usage (default: %(default)s).",
        )
        parser.add_argument(
            "--since", type=time_or_age, metavar="TIME", help="From this date or age on, such as 7d."
        )
        parser.add_argument(
            "--until", type=time_or_age, metavar="TIME", help="Before this date or age, such as 2026-11-20."
        )
        parser.add_argument(
            "--zone", help="Time zone of days and of dates without one (default: TIME_ZONE of the project)."
        )
        parser.add_argument("--agent-type", help="Only sessions of this agent type.")
        add_named_argument(parser, "--user", "--user-id", dest="user", help="Only sessions of this user.")
        parser.add_argument("--model", help="Only this model.")
        parser.add_argument(
            "--limit", type=at_least(1), metavar="N", help="Only the N highest groups, or the last N days."
        )
        parser.add_argument(
            "--budgets",
            action="store_true",
            help="List the budgets with the amounts spent, held and left now, instead of the usage.",
        )
        parser.add_argument("--csv", action="store_true", help="Write CSV, with exact costs.")

    def takes_one_database(self, options: Mapping[str, Any]) -> bool:
        return bool(options["csv"])

    def handle(self, *args: Any, **options: Any) -> None:
        if options["csv"] and self.is_json:
            raise WrongUsage("Choose --csv or --format json.")
        if options["budgets"]:
            self._list_budgets(options)
            return
        zone = project_zone() if options["zone"] is None else time_zone(options["zone"])
        since, until = (
            None if options[name] is None else moment_of(options[name], zone) for name in ("since", "until")
        )
        with self._telling_what_takes_long(), self.one_statement(options["database"], _STOPPED):
            report = usage_report(
                by=options["by"],
                using=options["database"],
                tenant=options["tenant"],
                agent_type=options["agent_type"],
                user_id=options["user"],
                model=options["model"],
                date_from=since,
                date_to=until,
                zone=zone,
                limit=options["limit"],
            )
        if options["csv"]:
            text = _csv(report)
            self.write_text(visible(text, keep="\n") if self.stdout.isatty() else text)
        elif self.is_json:
            asked = {
                "tenant": options["tenant"],
                "since": since and since.isoformat(),
                "until": until and until.isoformat(),
            }
            self.write_text(json.dumps({**asked, "zone": zone.key, **report.to_dict()}))
        else:
            self.write_text(self._table(report, zone))

    def _list_budgets(self, options: dict[str, Any]) -> None:
        refuse_options(options, _NOT_FOR_BUDGETS, "--budgets does not take")
        reports = list(all_reports(using=options["database"], tenant=options["tenant"]))
        if self.is_json:
            plain = {"tenant": options["tenant"], "budgets": [report.to_dict() for report in reports]}
            self.write_text(json.dumps(plain))
        elif reports:
            self.write_text(budgets_table(reports, self.layout))
        else:
            self.write_text("No budgets.")

    @contextmanager
    def _telling_what_takes_long(self) -> Iterator[None]:
        """Print a message if this takes long. One statement does all the work, so its progress is unknown."""
        timer = threading.Timer(1.0, self.progress, ["Adding up the usage…"])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _table(self, report: UsageReport, zone: ZoneInfo) -> str:
        if not report.groups:
            return "No usage."
        if report.by is UsageReportGrouping.DAY:
            lines = [days_table(report, self.layout, zone=zone.key)]
        else:
            lines = [groups_table(report, self.layout)]
        hidden = report.group_count - len(report.groups)
        if hidden:
            lines.append(f"Groups in the total that are not shown: {hidden:,}.")
        if report.total.unpriced:
            lines.append(f"Token entries without a known cost: {report.total.unpriced:,}.")
        if any(group.is_deleted for group in report.groups):
            lines.append("* The session was deleted, and its usage was kept.")
        return "\n".join(lines)


def _grouping(text: str) -> str:
    return text.replace("-", "_")


def _csv(report: UsageReport) -> str:
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerows(csv_rows(report))
    return written.getvalue()
