"""The benchmarks' own arithmetic: a ratio, a spread or a verdict that is wrong would be believed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.arguments import FULL, QUICK, Options, parse_arguments
from benchmarks.evidence import Evidence, NotDone
from benchmarks.figures import Figure, LeftOut, Target, Verdict
from benchmarks.operations import Operation
from benchmarks.paths import cases
from benchmarks.payloads import STATES, message, state_of
from benchmarks.pgbench import Script
from benchmarks.races import Client, Comparison, Race
from benchmarks.rounds import Ran, ratios, run_rounds
from benchmarks.table import HEADER, row, summary
from helix_store.stores import DatabaseStateStore
from tests.cells import for_each


@dataclass
class FakeLeg:
    """A leg on a clock of its own: so many operations a second, whatever is asked of it."""

    rates: Callable[[int], float]
    diary: list[str] = field(default_factory=list)
    name: str = ""
    counts: list[int] = field(default_factory=list)
    prepared: list[int] = field(default_factory=list)

    def prepare(self, count: int) -> None:
        self.prepared.append(count)

    def run(self, count: int) -> Ran:
        self.diary.append(self.name)
        self.counts.append(count)
        return Ran(count, count / self.rates(len(self.counts)))


def _never_made(worker: int) -> Operation:
    raise NotImplementedError


class TestTargets:
    @pytest.mark.parametrize(
        ("value", "verdict"),
        [(0.59, Verdict.MISSED), (0.6, Verdict.FLOOR), (0.89, Verdict.FLOOR), (0.9, Verdict.AIM)],
    )
    def test_more_is_better_unless_it_is_said(self, value: float, verdict: Verdict) -> None:
        assert Target(0.6, 0.9).verdict(value) is verdict

    @pytest.mark.parametrize(
        ("value", "verdict"),
        [(1.21, Verdict.MISSED), (1.2, Verdict.FLOOR), (1.11, Verdict.FLOOR), (1.1, Verdict.AIM)],
    )
    def test_at_most_turns_it_round(self, value: float, verdict: Verdict) -> None:
        assert Target(1.2, 1.1, at_most=True).verdict(value) is verdict

    def test_no_error_at_all_is_the_only_way_to_meet_a_target_of_none(self) -> None:
        none = Target(0, 0, at_most=True)
        assert (none.verdict(0), none.verdict(1)) == (Verdict.AIM, Verdict.MISSED)


class TestFigures:
    def test_a_figure_is_judged_by_its_median_and_shows_its_spread(self) -> None:
        figure = Figure(path="p", values=[0.1, 0.7, 0.65, 9.0, 0.2], target=Target(0.6, 0.9))
        assert (figure.median, figure.lowest, figure.highest) == (0.65, 0.1, 9.0)
        assert figure.verdict is Verdict.FLOOR

    def test_a_figure_without_a_target_has_no_verdict(self) -> None:
        assert Figure(path="p", values=[1]).verdict is Verdict.NOT_ASKED

    def test_figures_are_written_as_json_with_every_round(self) -> None:
        figure = Figure(
            path="p", values=[1.0, 3.0], target=Target(10, 5, at_most=True), rates={"ours": [10.0, 30.0]}
        )
        read = json.loads(json.dumps(figure.to_dict()))
        assert read["values"] == [1.0, 3.0]
        assert (read["median"], read["floor"], read["aim"], read["met"]) == (2.0, 10, 5, "aim")
        assert read["smaller_is_better"] is True
        assert read["rates"] == {"ours": [10.0, 30.0]}


class TestRounds:
    def test_a_ratio_is_taken_within_a_round(self) -> None:
        assert ratios([10, 40], [20, 20]) == [0.5, 2.0]

    def test_rounds_of_different_number_are_not_compared(self) -> None:
        with pytest.raises(ValueError, match="shorter"):
            ratios([1, 2], [1])

    def test_a_rate_is_operations_over_seconds(self) -> None:
        assert Ran(30, 1.5).rate == 20

    def test_every_leg_runs_once_a_round_and_the_order_changes(self) -> None:
        diary: list[str] = []
        legs = {name: FakeLeg(lambda run: 1_000, diary, name) for name in "abc"}
        rates = run_rounds(legs, rounds=8, seconds=0.1)
        assert {name: len(found) for name, found in rates.items()} == {"a": 8, "b": 8, "c": 8}
        rounds = ["".join(diary[-24:][start : start + 3]) for start in range(0, 24, 3)]
        assert all(set(each) == set("abc") for each in rounds)
        assert len(set(rounds)) > 1

    def test_a_leg_is_given_what_takes_it_about_the_time(self) -> None:
        leg = FakeLeg(lambda run: 500)
        run_rounds({"a": leg}, rounds=2, seconds=2)
        assert leg.counts[-2:] == [1_000, 1_000]

    def test_a_leg_that_gets_slower_is_given_less(self) -> None:
        leg = FakeLeg(lambda run: 1_000 / run)
        run_rounds({"a": leg}, rounds=5, seconds=1)
        assert leg.counts[-1] < leg.counts[-5]

    def test_bounds_hold_whatever_the_time(self) -> None:
        slow, fast = FakeLeg(lambda run: 1), FakeLeg(lambda run: 1_000_000)
        run_rounds({"slow": slow, "fast": fast}, rounds=3, seconds=1, bounds=(20, 40))
        assert set(slow.counts) == {20}
        assert fast.counts[-3:] == [40, 40, 40]

    def test_what_is_run_was_prepared_with_the_same_count(self) -> None:
        leg = FakeLeg(lambda run: 700)
        run_rounds({"a": leg}, rounds=3, seconds=1)
        assert leg.prepared == leg.counts


class TestTable:
    def test_a_row_stands_under_its_header(self) -> None:
        figure = Figure(
            path="step",
            values=[0.5, 0.61, 0.7],
            target=Target(0.6, 0.9),
            rates={"ours": [1_500, 1_600], "limit": [2_500.0]},
        )
        line = row(figure)
        assert line.startswith("step ")
        for title, text in (("median", "0.61 x"), ("floor", "0.6"), ("aim", "0.9"), ("met?", "floor")):
            end = HEADER.index(title) + len(title)
            assert line[:end].endswith(text), title
        assert "0.50 to 0.70" in line
        assert line.endswith("ours 1,550/s, limit 2,500/s")

    def test_what_must_not_grow_says_so(self) -> None:
        line = row(Figure(path="fork", values=[7.25], unit="ms", target=Target(10, 5, at_most=True)))
        assert "7.25 ms" in line
        assert "≤ 10" in line
        assert "≤ 5" in line

    def test_what_was_left_out_says_why(self) -> None:
        assert row(LeftOut("step against a peer", "not installed")).endswith("left out: not installed")

    def test_the_summary_counts_targets_and_names_what_is_missed(self) -> None:
        target = Target(0.6, 0.9)
        figures: list[Figure | LeftOut] = [
            Figure(path="good", values=[1.0], target=target),
            Figure(path="fair", values=[0.7], target=target),
            Figure(path="bad", values=[0.1], target=target),
            Figure(path="without a target", values=[0.1]),
            LeftOut("peer", "not installed"),
        ]
        assert summary(figures).splitlines() == [
            "2 of 3 floors met, 1 of them with the aim.",
            "Floor missed: bad",
        ]


class TestArguments:
    def test_a_full_run_is_the_default(self) -> None:
        options = parse_arguments([])
        assert options == Options(scale=FULL, is_quick=False, only=(), json=None)
        assert options.scale.sessions == 1_000_000
        assert "QUICK" not in options.describe()

    def test_a_quick_run_says_what_it_leaves_out(self) -> None:
        options = parse_arguments(["--quick"])
        assert options.scale == QUICK
        assert options.describe().startswith("QUICK RUN")
        assert "100,000 sessions" in options.describe()

    def test_rounds_and_seconds_win_over_the_kind_of_run(self) -> None:
        scale = parse_arguments(["--quick", "--rounds", "7", "--seconds", "0.25"]).scale
        assert (scale.rounds, scale.seconds, scale.sessions) == (7, 0.25, QUICK.sessions)

    def test_commits_can_take_longer(self) -> None:
        options = parse_arguments(["--commit-delay", "150"])
        assert options.commit_delay == 150
        assert "150 µs" in options.describe()
        assert "µs" not in parse_arguments([]).describe()

    @for_each(
        "wrong",
        [
            ["--commit-delay", "0"],
            ["--rounds", "0"],
            ["--seconds", "0"],
            ["--seconds", "nan"],
            ["--seconds", "inf"],
        ],
    )
    def test_no_round_and_no_time_are_refused(self, wrong: list[str]) -> None:
        with pytest.raises(SystemExit):
            parse_arguments(wrong)

    def test_only_chooses_by_a_part_of_the_name_in_any_case(self) -> None:
        options = parse_arguments(["--only", "SQLite", "--only", "fork", "--json", "figures.json"])
        assert options.wants("sqlite step 4 KB")
        assert options.wants("a fork")
        assert not options.wants("load_state")
        assert options.json == Path("figures.json")


class TestPayloads:
    def test_a_step_changes_two_of_twenty_four_keys(self) -> None:
        for step in range(2 * STATES):
            before, after = state_of(4, step), state_of(4, step + 1)
            assert len(before) == 24
            assert sum(before[key] != after[key] for key in before) == 2
        assert state_of(4, STATES) == state_of(4, 0)

    def test_payloads_have_the_sizes_that_the_targets_were_set_for(self) -> None:
        sizes = [len(json.dumps(payload)) for payload in (state_of(4), state_of(16), message(1))]
        for size, kib in zip(sizes, (4, 16, 1), strict=True):
            assert size == pytest.approx(kib * 1024, rel=0.1)


class TestRaces:
    def test_a_peer_that_is_not_installed_leaves_its_rows_out_and_says_why(self) -> None:
        race = Race(
            contestants={
                "ours": Client(operation=_never_made),
                "peer": Client(operation=_never_made, missing="it is not installed"),
            },
            comparisons=[Comparison(path="against a peer", to="peer")],
        )
        nobody: Any = None
        assert list(race.measure(nobody, lambda path: True)) == [
            LeftOut("against a peer", "it is not installed")
        ]
        assert list(race.measure(nobody, lambda path: False)) == []

    def test_a_comparison_is_a_ratio_of_rates_or_the_time_of_an_operation(self) -> None:
        rates = {"ours": [100.0, 200.0], "limit": [200.0, 100.0]}
        assert Comparison(path="p").figure(rates).values == [0.5, 2.0]
        assert Comparison(path="p", to=None, recorded=50).figure(rates).values == [2.0, 4.0]
        alone = Comparison(path="p", to=None).figure(rates)
        assert (alone.values, alone.unit) == ([10.0, 5.0], "ms")

    def test_with_processes_a_race_has_other_names_and_no_targets(self) -> None:
        race = Race(contestants={}, comparisons=[Comparison(path="p", target=Target(1, 2))])
        shared = race.with_processes(8)
        assert (shared.workers, shared.paths) == (8, ["p, 8 processes"])
        assert shared.comparisons[0].target is None

    def test_no_two_rows_of_a_run_have_the_same_name(self) -> None:
        for scale in (FULL, QUICK):
            names = [path for case in cases(scale) for path in case.paths]
            assert len(names) == len(set(names))


class TestEvidence:
    def test_work_that_was_not_done_stops_the_run(self, db: None) -> None:
        evidence = Evidence("SELECT (SELECT count(*) FROM helix_store_session), 7", (1, 0))
        before = evidence.numbers()
        DatabaseStateStore().create_session("s", agent_type="t")
        evidence.require(before, 1)
        with pytest.raises(NotDone, match="2 operations"):
            evidence.require(before, 2)


class TestScripts:
    def test_a_script_counts_before_it_chooses(self) -> None:
        script = Script(choose="\\set s 1 + :k % 200", sql="SELECT :s;")
        assert script.text.splitlines() == ["\\set k :k + 1", "\\set s 1 + :k % 200", "SELECT :s;"]
