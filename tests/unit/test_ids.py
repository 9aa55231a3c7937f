"""New ids: always larger than the last one, whatever threads, clocks and forks do."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, pairwise
from uuid import RFC_4122, UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helix_store.checkpointers import SnapshotCheckpointer
from helix_store.core.ids import (
    IdGenerator,
    ParsedCheckpointId,
    checkpoint_id,
    new_id,
    parse_checkpoint_id,
)
from helix_store.exceptions import InvalidPayload
from tests.cells import for_each

MILLISECOND = 1_000_000


def _milliseconds(text: str) -> int:
    return UUID(text).int >> 80


def _is_strictly_increasing(ids: list[str]) -> bool:
    return all(first < second for first, second in pairwise(ids))


# --- UUIDv7 ---------------------------------------------------------------------------------------


def test_an_id_is_a_canonical_uuid_of_version_7() -> None:
    for text in [new_id() for _ in range(1_000)]:
        parsed = UUID(text)
        assert str(parsed) == text
        assert (parsed.version, parsed.variant) == (7, RFC_4122)


def test_an_id_holds_the_time_it_was_made() -> None:
    before = time.time_ns() // MILLISECOND
    made = _milliseconds(IdGenerator()())
    assert before <= made <= time.time_ns() // MILLISECOND


def test_ids_of_one_millisecond_increase() -> None:
    generate = IdGenerator(clock_ns=lambda: 1_700_000_000_000 * MILLISECOND)
    ids = [generate() for _ in range(20_000)]
    assert _is_strictly_increasing(ids)
    assert {_milliseconds(text) for text in ids} == {1_700_000_000_000}


def test_ids_increase_while_the_clock_steps_back_and_forth() -> None:
    ticks = cycle(ms * MILLISECOND for ms in [1_700_000_000_000, 1_699_999_000_000, 1_700_000_000_001, 0, 1])
    generate = IdGenerator(clock_ns=lambda: next(ticks))
    assert _is_strictly_increasing([generate() for _ in range(5_000)])


def test_a_clock_that_recovers_is_followed_again() -> None:
    ticks = iter([2_000 * MILLISECOND, 1_000 * MILLISECOND, 3_000 * MILLISECOND])
    generate = IdGenerator(clock_ns=lambda: next(ticks))
    assert [_milliseconds(generate()) for _ in range(3)] == [2_000, 2_000, 3_000]


@given(st.lists(st.integers(min_value=0, max_value=2**47 * MILLISECOND), min_size=2, max_size=50))
def test_ids_increase_on_any_clock(ticks: list[int]) -> None:
    remaining = iter(ticks)
    generate = IdGenerator(clock_ns=lambda: next(remaining))
    assert _is_strictly_increasing([generate() for _ in ticks])


def test_ids_increase_over_threads() -> None:
    threads, rounds = 8, 3_000
    barrier = threading.Barrier(threads)

    def generate() -> list[str]:
        barrier.wait()
        return [new_id() for _ in range(rounds)]

    with ThreadPoolExecutor(threads) as pool:
        batches = [future.result() for future in [pool.submit(generate) for _ in range(threads)]]
    assert all(_is_strictly_increasing(batch) for batch in batches)
    assert len(set().union(*batches)) == threads * rounds


FORKING_PROGRAM = """
import os, signal
from helix_store.core.ids import new_id

new_id()
reading, writing = os.pipe()
new_id._lock.acquire()  # as another thread of the parent may have done
if os.fork() == 0:
    signal.alarm(20)
    with open(writing, "w") as pipe:
        pipe.writelines(new_id() + "\\n" for _ in range(5_000))
    os._exit(0)
new_id._lock.release()
os.close(writing)
for _ in range(5_000):
    print(new_id())
with open(reading) as pipe:
    print(pipe.read())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_copy_of_the_generator_is_the_generator() -> None:
    for other in (copy.copy(new_id), copy.deepcopy(new_id), pickle.loads(pickle.dumps(new_id))):  # noqa: S301
        assert other is new_id
    checkpointer = copy.deepcopy(SnapshotCheckpointer())
    assert checkpointer.max_checkpoints_per_thread == 100


def test_a_forked_child_neither_waits_for_its_parents_threads_nor_repeats_its_ids() -> None:
    program = [sys.executable, "-c", FORKING_PROGRAM]
    finished = subprocess.run(program, capture_output=True, text=True, timeout=120, check=True)
    ids = finished.stdout.split()
    assert len(set(ids)) == len(ids) == 10_000


def test_a_forked_childs_ids_do_not_continue_its_parents() -> None:
    generate = IdGenerator(clock_ns=lambda: 5 * MILLISECOND)
    parent = UUID(generate()).int
    generate.reset()
    assert abs(UUID(generate()).int - parent) > 2**40


# --- Step checkpoint ids --------------------------------------------------------------------------

session_ids = st.one_of(
    st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=255),
    st.sampled_from(
        ["-", "a-s1-t2-abcdef", "cpv1-x-s1-t2-abcdef", "-s1-t1-000000", "../../x", "s" * 255, "-s1" * 85]
    ),
)


@given(session_ids, st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
def test_a_checkpoint_id_is_read_back_as_it_was_made(session_id: str, step_count: int, epoch_ms: int) -> None:
    text = checkpoint_id(session_id, step_count, epoch_ms)
    parsed = parse_checkpoint_id(text)
    assert parsed == ParsedCheckpointId(session_id, step_count, epoch_ms, text[-6:])
    assert text == f"cpv1-{session_id}-s{step_count}-t{epoch_ms}-{parsed.random}"


def test_a_checkpoint_id_takes_the_current_time() -> None:
    before = time.time_ns() // MILLISECOND
    parsed = parse_checkpoint_id(checkpoint_id("session", 3))
    assert before <= parsed.epoch_ms <= time.time_ns() // MILLISECOND


def test_checkpoint_ids_of_one_step_and_moment_differ() -> None:
    assert len({checkpoint_id("session", 1, 1) for _ in range(20)}) > 15


@for_each(
    "text",
    [
        "",
        "cpv1",
        "cpv1--s1-t2-abcdef",
        "cpv1-x-s1-t2-abcde",
        "cpv1-x-s1-t2-abcdefa",
        "cpv1-x-s1-t2-ABCDEF",
        "cpv1-x-s1-t2-abcdeg",
        "cpv1-x-s1-t2-abcdef\n",
        " cpv1-x-s1-t2-abcdef",
        "cpv2-x-s1-t2-abcdef",
        "cpv1-x-s-1-t2-abcdef",
        "cpv1-x-s1.0-t2-abcdef",
        "cpv1-x-s1_0-t2-abcdef",
        "cpv1-x-s\u0661-t2-abcdef",
        "cpv1-x-t2-s1-abcdef",
        "cpv1-x\x00-s1-t2-abcdef",
        "cpv1-" + "x" * 256 + "-s1-t2-abcdef",
        "cpv1-x-s" + "1" * 5_000 + "-t2-abcdef",
        "cpv1" + "-s1-t1-abcdef" * 10_000 + "!",
        None,
        17,
        b"cpv1-x-s1-t2-abcdef",
    ],
)
def test_anything_else_is_no_checkpoint_id(text: object) -> None:
    with pytest.raises(InvalidPayload) as caught:
        parse_checkpoint_id(text)  # type: ignore[arg-type]  # what callers pass by mistake
    assert caught.value.path == "/checkpoint_id"


@pytest.mark.parametrize(
    ("session_id", "step_count", "epoch_ms"), [("", 1, 1), ("x", -1, 1), ("x", True, 1), ("x", 1, 1.5)]
)
def test_a_checkpoint_id_is_made_of_valid_parts_only(session_id: str, step_count: int, epoch_ms: int) -> None:
    with pytest.raises(InvalidPayload):
        checkpoint_id(session_id, step_count, epoch_ms)
