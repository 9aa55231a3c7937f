"""Each planted fault is found by its own rule and by no other, and says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.apps import apps
from django.db import transaction
from pytest_django import DjangoDbBlocker

from helix_store.doctor import RULES, Diagnosis, Fault, Finding, Listener, Severity, diagnose
from helix_store.models import SubSessionRef
from tests.cells import for_each
from tests.databases import ALIASES, CommittedDatabase, close_connections, delete_all_rows, fresh_tenant
from tests.doctor.planting import FIXABLE, LEFT, PLANTED, Planted, execute
from tests.doctor.sample import write_sample


@pytest.fixture(scope="module", params=list(ALIASES))
def alias(request: pytest.FixtureRequest) -> str:
    return ALIASES[request.param]


@pytest.fixture(scope="module")
def written(
    alias: str, django_db_setup: None, django_db_blocker: DjangoDbBlocker
) -> Iterator[CommittedDatabase]:
    """The sample, written once for all tests, in a transaction that stays open."""
    database = CommittedDatabase(alias=alias, tenant=fresh_tenant())
    with django_db_blocker.unblock():
        delete_all_rows(database.alias)
        with transaction.atomic(using=database.alias):
            write_sample(database)
            yield database
            transaction.set_rollback(True, using=database.alias)
        close_connections()


@pytest.fixture(scope="module")
def sound(written: CommittedDatabase) -> dict[str, list[Any]]:
    return rows_of(written)


@pytest.fixture
def sample(written: CommittedDatabase) -> Iterator[CommittedDatabase]:
    """What a test does to the sample is undone."""
    with transaction.atomic(using=written.alias):
        yield written
        transaction.set_rollback(True, using=written.alias)


def examined(database: CommittedDatabase, **options: Any) -> Diagnosis:
    return diagnose(using=database.alias, **options)


def rows_of(database: CommittedDatabase) -> dict[str, list[Any]]:
    """Every row of every table."""
    return {
        model.__name__: list(model._default_manager.using(database.alias).order_by("pk").values())
        for model in apps.get_app_config("helix_store").get_models()
    }


@pytest.mark.thorough
def test_a_sound_database_has_no_finding(sample: CommittedDatabase) -> None:
    before = rows_of(sample)
    empty = [name for name, rows in before.items() if not rows]
    assert empty == []
    diagnosis = examined(sample)
    assert diagnosis.findings == []
    assert diagnosis.stopped_at is None
    assert diagnosis.schema_version == 7
    assert examined(sample, fix=True).findings == []
    assert rows_of(sample) == before


def only_finding(diagnosis: Diagnosis, planted: Planted) -> Finding:
    (finding,) = diagnosis.findings
    assert (finding.id, finding.table, finding.count) == (planted.rule, planted.table, planted.count)
    assert len(finding.samples) == planted.count
    assert finding.what
    assert finding.advice
    return finding


def test_every_rule_about_rows_is_planted() -> None:
    of_databases = {rule for rule in RULES if rule.startswith(("schema-", "search-path-", "pooler-"))}
    elsewhere = {"app-rows-unsound", "unreadable-row"}  # tests/adapters and test_damaged_values.py
    assert {planted.rule for planted in PLANTED} == RULES.keys() - of_databases - elsewhere
    assert {planted.rule for planted in FIXABLE} == {rule.id for rule in RULES.values() if rule.fix}


class Heard(Listener):
    """What a listener is told, in order, with the rows of the database at each time."""

    def __init__(self, database: CommittedDatabase) -> None:
        self.database = database
        self.told: list[tuple[str, str, dict[str, list[Any]]]] = []

    def fixes(self, fault: Fault, action: str) -> None:
        assert action == RULES[fault.rule_id].fix
        self.told.append(("fixes", fault.rule_id, rows_of(self.database)))

    def left(self, fault: Fault) -> None:
        self.told.append(("left", fault.rule_id, rows_of(self.database)))


@pytest.mark.thorough
@for_each("planted", FIXABLE, ids=lambda planted: planted.id)
def test_a_fix_is_told_mends_the_fault_and_changes_nothing_else(
    sample: CommittedDatabase, sound: dict[str, list[Any]], planted: Planted
) -> None:
    planted.plant(sample)
    broken = rows_of(sample)
    trial = Heard(sample)
    finding = only_finding(examined(sample, fix=True, dry_run=True, listener=trial), planted)
    assert (finding.fixed, finding.is_problem) == (0, True)
    assert [told[:2] for told in trial.told] == [("fixes", planted.rule)]
    assert rows_of(sample) == broken
    heard = Heard(sample)
    diagnosis = examined(sample, fix=True, listener=heard)
    (finding,) = diagnosis.findings
    assert (finding.fixed, finding.is_problem, diagnosis.has_problems) == (planted.count, False, False)
    assert heard.told == [("fixes", planted.rule, broken)]
    assert examined(sample).findings == []
    assert changed(sound, rows_of(sample)) == planted.remains


def changed(before: dict[str, list[Any]], after: dict[str, list[Any]]) -> set[str]:
    """The columns in which rows differ."""
    found = set()
    for table, rows in before.items():
        assert [row["id"] for row in rows] == [row["id"] for row in after[table]]
        for row, other in zip(rows, after[table], strict=True):
            found |= {f"{table}.{column}" for column, value in row.items() if other[column] != value}
    return found


@pytest.mark.thorough
@for_each("planted", LEFT, ids=lambda planted: planted.id)
def test_what_is_not_safe_to_fix_is_found_and_stays_as_it_is(
    sample: CommittedDatabase, planted: Planted
) -> None:
    planted.plant(sample)
    broken = rows_of(sample)
    heard = Heard(sample)
    finding = only_finding(examined(sample, fix=True, listener=heard), planted)
    assert (finding.fixed, finding.is_problem) == (0, True)
    assert [told[:2] for told in heard.told if told[0] == "left"] == [("left", planted.rule)] * len(
        [told for told in heard.told if told[0] == "fixes"]
    )
    assert rows_of(sample) == broken


def test_a_count_is_not_lowered_below_what_a_checkpoint_has(sample: CommittedDatabase) -> None:
    execute(sample, "DELETE FROM [message] WHERE session_id = [=steps] AND sequence = 6")
    heard = Heard(sample)
    diagnosis = examined(sample, fix=True, listener=heard)
    assert {finding.id for finding in diagnosis.findings} == {
        "message-count-off",
        "checkpoint-beyond-history",
    }
    assert all(finding.fixed == 0 for finding in diagnosis.findings)
    assert [told[:2] for told in heard.told] == [
        ("fixes", "message-count-off"),
        ("left", "message-count-off"),
    ]


@pytest.mark.thorough
def test_a_ref_that_runs_may_wait_for_its_sub_session(sample: CommittedDatabase) -> None:
    """A ref is often recorded before the sub-session begins, and a remote one is stored elsewhere."""
    execute(sample, "UPDATE [sub_session_ref] SET sub_session_id = 'nobody'")
    local = SubSessionRef.objects.using(sample.alias).filter(location="local")
    running = local.filter(status="running").count()
    assert running > 1
    diagnosis = examined(sample, fix=True)
    (finding,) = diagnosis.findings
    assert (finding.id, finding.severity, finding.count, finding.fixed) == ("ref-missing", "info", running, 0)
    assert not diagnosis.has_problems

    execute(sample, "UPDATE [sub_session_ref] SET status = 'failed' WHERE session_id = [=root]")
    diagnosis = examined(sample)
    found = {finding.severity: finding for finding in diagnosis.findings}
    assert {severity: finding.count for severity, finding in found.items()} == {
        "info": running - 1,
        "warning": 1,
    }
    (missing,) = found[Severity.WARNING].samples
    assert (missing.tenant, str(missing)) == (sample.tenant, "root nobody")
    assert diagnosis.has_problems

    execute(sample, "UPDATE [sub_session_ref] SET location = 'remote'")
    assert examined(sample).findings == []


@pytest.mark.thorough
def test_a_newer_state_is_kept(sample: CommittedDatabase) -> None:
    (planted,) = (each for each in FIXABLE if each.rule == "state-unneeded")
    planted.plant(sample)
    execute(sample, "UPDATE [checkpoint] SET version = 7 WHERE session_id = [=steps] AND kind = 'state'")
    before = rows_of(sample)
    (finding,) = examined(sample, fix=True).findings
    assert finding.fixed == 0
    assert rows_of(sample) == before


def test_all_faults_of_a_rule_are_one_finding_with_ten_samples(sample: CommittedDatabase) -> None:
    execute(sample, "UPDATE [session] SET version = 0")
    execute(sample, "DELETE FROM [operation]")
    (finding,) = examined(sample).findings
    assert finding.count == len(rows_of(sample)["Session"]) > len(finding.samples) == 10
