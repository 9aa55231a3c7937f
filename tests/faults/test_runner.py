"""The program that runs the campaigns finds all of them, and says what they report."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.faults.campaign import Campaign
from tests.faults.runner import FOLDER, campaign_names, table


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=FOLDER.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_campaign_is_found() -> None:
    collected = run("pytest", "--collect-only", "-q", "-m", "campaign", str(FOLDER))
    names = set(re.findall(r"test_(\w+)\.py::", collected.stdout))
    assert "lost_commits" in names
    assert campaign_names() == sorted(names)


def test_the_table_bounds_the_rate_of_what_has_not_failed() -> None:
    sound = {
        "name": "lost_commits",
        "database": "postgres",
        "first_seed": 1,
        "trials": 10_000,
        "of": 10_000,
        "seconds": 60.0,
        "per_minute": 10_000,
        "failures": [],
    }
    faulty = {**sound, "name": "histories", "failures": [{"seed": 3}]}
    lines = table([sound, faulty]).splitlines()
    assert lines[2] == "| lost_commits | postgres | 1 | 10000 | 10000 | 60.0 | 10000 | 0 | 0.0003 |"
    assert lines[3] == "| histories | postgres | 1 | 10000 | 10000 | 60.0 | 10000 | 1 |  |"


def test_a_seed_without_a_campaign_is_refused() -> None:
    refused = run("tests.faults", "--seed", "3")
    assert refused.returncode == 2
    assert "--seed and --count need the name of a campaign" in refused.stderr


def test_a_campaign_whose_time_is_over_says_how_many_of_its_trials_it_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HELIX_FAULTS_SECONDS", "0")
    monkeypatch.delenv("HELIX_FAULTS_COUNT", raising=False)
    monkeypatch.setenv("HELIX_FAULTS_TIER", "2")
    made = Campaign("nothing", "sqlite", sizes=(1, 50, 100), per_seed=2)
    made.run(lambda trial: None)
    assert (made.report()["trials"], made.report()["of"]) == (1, 50)
    assert [len(batch) for batch in made.batches(10)] == [1]
    monkeypatch.setenv("HELIX_FAULTS_SECONDS", "3600")
    assert [len(batch) for batch in made.batches(10)] == [1, 2, 4, 8, 10]
    monkeypatch.delenv("HELIX_FAULTS_SECONDS")
    assert [len(batch) for batch in made.batches(10)] == [10, 10, 5]
