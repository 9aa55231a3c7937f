"""Writers that change the same rows while connections are cut at random: each change is applied once."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import pytest
from asgiref.sync import async_to_sync

from helix_store.exceptions import OutcomeUnknown, StaleStateError
from helix_store.stores import DatabaseStateStore, DatabaseStreamManager
from tests.faults.campaign import Trial, campaign
from tests.faults.proxy import Cut
from tests.faults.wires import Wire

OPERATIONS: Final = 40
"""Of each trial. A fifth of them are cut, and meet the next operation of the other writer in between."""
CUT_SHARE: Final = 0.2
STEPS: Final = 3
CUTS: Final = (Cut.BEFORE, Cut.AFTER, Cut.IN_REPLY, Cut.RUNNING)
SMALL: Final = ("\n", ".", "\n", "tick")


@dataclass
class Told:
    """What callers were told of changes with an id of their own, and of chunks."""

    stored: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)
    sequences: dict[int, str] = field(default_factory=dict)
    doubled: list[int] = field(default_factory=list)


class Story:
    """A session, its stream and two writers: one behind the proxy, one in front of it."""

    def __init__(self, wire: Wire, trial: Trial) -> None:
        self.wire = wire
        self.trial = trial
        self.name = f"session-{trial.seed}"
        self.told = Told()
        self.number = 0
        self.store(wire.direct).create_session(self.name, agent_type="agent", custom_state={"done": []})
        async_to_sync(self.streams(wire.direct).create_writer)(self.name, "run", "agent")
        self.calls: list[Callable[[str, random.Random], None]] = [
            *(self.stage, self.stage, self.append, self.append),
            *(self.step, self.promote),
        ]

    def store(self, alias: str) -> DatabaseStateStore:
        return DatabaseStateStore(alias, tenant=self.wire.tenant)

    def streams(self, alias: str) -> DatabaseStreamManager:
        return DatabaseStreamManager(alias, tenant=self.wire.tenant)

    def run(self) -> None:
        chance, wire = self.trial.chance, self.wire
        for _ in range(OPERATIONS):
            call, between = chance.choice(self.calls), chance.choice(self.calls)
            if chance.random() < CUT_SHARE:
                drawn = random.Random(chance.random())  # noqa: S311  the same draws for the same seed
                before = wire.proxy.cuts
                wire.proxy.arm(chance.choice(CUTS), meanwhile=partial(between, wire.direct, drawn))
                call(wire.alias, chance)
                wire.proxy.disarm()
                self.trial.count("cuts", wire.proxy.cuts - before)
            else:
                call(chance.choice([wire.alias, wire.direct]), chance)
            self.trial.count("operations")

    # Operations

    def stage(self, alias: str, chance: random.Random) -> None:
        """Stage the addition of a name that no other change adds."""
        self.number += 1
        name = f"change-{self.number}"
        changes = {"tool_call_id": name, "merge_changes": {"done": [name]}}
        with self.outcome(name):
            self.store(alias).stage_changes(self.name, self.step_id(chance), changes)

    def promote(self, alias: str, chance: random.Random) -> None:
        # Not cut where nothing is staged, and safe to repeat.
        self.store(alias).promote_staging(self.name, self.step_id(chance))

    def step(self, alias: str, chance: random.Random) -> None:
        self.number += 1
        message = {"role": "assistant", "content": f"step-{self.number}"}
        store = self.store(alias)
        state = store.load_state(self.name)
        assert state is not None
        with self.outcome(message["content"]):
            store.save_state_and_promote_staging(
                self.name,
                state,
                [message],
                {"step_id": self.step_id(chance), "step_count": self.number},
                expected_version=state.version,
            )

    def append(self, alias: str, chance: random.Random) -> None:
        """Append a chunk that is often equal to others."""
        text = chance.choice(SMALL)
        with self.outcome(f"chunk {text!r}"):
            sequence = self.streams(alias).write_sync(self.name, [{"type": "text", "text": text}])
            if sequence in self.told.sequences:
                self.told.doubled.append(sequence)
            self.told.sequences[sequence] = text

    def step_id(self, chance: random.Random) -> str:
        return f"step-{chance.randrange(STEPS)}"

    @contextmanager
    def outcome(self, name: str) -> Iterator[None]:
        """Note what the caller of a ``with`` block was told."""
        try:
            yield
        except OutcomeUnknown:
            self.told.unknown[name] += 1
            self.trial.count("unknown")
        except StaleStateError:
            self.trial.count("refused")
        else:
            self.told.stored[name] += 1

    # The oracle

    def require_what_was_told(self) -> None:
        store, told = self.store(self.wire.direct), self.told
        for number in range(STEPS):
            store.promote_staging(self.name, f"step-{number}")
        state = store.load_state(self.name)
        assert state is not None
        messages = [message["content"] for message in store.get_messages(self.name, limit=500).messages]
        chunks = [
            f"chunk {chunk.chunk['text']!r}"
            for chunk in self.streams(self.wire.direct).read_after(self.name, 0, limit=500)
        ]
        found = Counter(state.custom_state["done"]) + Counter(messages)
        for name, count in found.items():
            assert count == 1, f"{name} was applied {count} times"
        found += Counter(chunks)
        for name in found | told.stored:
            fewest, unknown = told.stored[name], told.unknown[name]
            assert fewest <= found[name] <= fewest + unknown, (
                f"{name!r}: acknowledged {fewest}, unknown {unknown}, stored {found[name]}"
            )
        assert not told.doubled, f"two appends were told one sequence: {told.doubled}"
        for sequence, text in told.sequences.items():
            assert chunks[sequence - 1] == f"chunk {text!r}", f"another chunk has sequence {sequence}"


def trial_of(wire: Wire, trial: Trial) -> None:
    story = Story(wire, trial)
    story.run()
    story.require_what_was_told()


@pytest.mark.campaign
def test_each_change_is_applied_once_while_connections_are_cut(wire: Wire) -> None:
    with campaign("writers_under_cuts", "postgres", sizes=(1, 250, 10_000)) as made:
        made.run(lambda trial: trial_of(wire, trial))
    assert made.counts["cuts"] > 0
