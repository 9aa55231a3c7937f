"""Writers killed in each kind of write leave it all old or all new, and lose nothing acknowledged."""

from __future__ import annotations

import inspect
import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import pytest

from helix_store.contrib.langgraph import DjangoSaver
from helix_store.contrib.openai_agents import RunStateClaim, RunStateStore
from tests.database.counted_calls import CLASSES
from tests.databases import CommittedDatabase
from tests.faults.campaign import campaign
from tests.faults.killed_writers import KILLS_PER_SEED, FacesOf, kill_writers
from tests.faults.planted_writes import PLANTED
from tests.faults.writes import KEY, STORIES, Faces, write
from tests.faults.writes.frameworks import FRAMEWORK_CLASSES
from tests.faults.writes.mirrors import mirror_of
from tests.faults.writes.rows import Rows
from tests.faults.writes.stories import public_contents
from tests.processes import run_in_processes

STEPS = ("a step", "a guarded step")
_DRIVERS: Final = 4
_STORIES_AT_A_TIME: Final = 20
READS = {
    *(
        "check_interrupt",
        "find_due_posts",
        "find_expired_pending",
        "get_checkpoint",
        "get_current_run",
        "get_latest_checkpoint",
        "find_unknown_effects",
        "list_effects",
        "list_posts",
        "posts",
    ),
    *("get_message_count", "get_messages", "get_staged_changes", "get_sub_session_refs", "iter_messages"),
    *("list_checkpoints", "list_runs", "list_sessions", "load_state", "session_exists"),
    *("checkpoints", "load", "messages", "usage"),
    *("get_active_locks", "is_locked", "is_trusted"),
    *("exists", "get_entries", "get_rollup", "query_usage", "timeseries"),
    *("create_reader", "create_resumable_reader", "get_info", "read_after"),
    *("continue_latest", "get_session", "get_session_summary", "list_session_summaries", "search_sessions"),
    *("count", "get", "lanes", "tail", "list"),
    *("get_delta_channel_history", "get_next_version", "get_tuple", "with_allowlist", "waiting"),
    *("find_turns_by_content", "get_conversation_by_turns", "get_conversation_turns", "get_items"),
    *("get_tool_usage", "list_branches", "switch_to_branch"),
    *("get_session_usage", "get_turn_usage", "list_conversations", "load_entries", "read_entry"),
    *("read_history", "read_record", "read_records", "list_messages", "read_agent", "read_message"),
    *("read_multi_agent", "read_session", "list_subkeys", "session_id_of"),
    *("get_budget", "list_budgets", "status"),
    *("from_conn_string", "setup"),
}
MADE_OF_OTHERS = {
    *("new_session", "session", "branch", "rewind", "say", "update", "post"),
    *("create_branch_from_content", "delete_record", "write_record"),
    *("wait_acquire", "keep_alive", "write", "claim_write_ownership", "check_write_ownership"),
}
"""Writes that are another one with other arguments, or several of them."""

OF_BUDGETS = {"set_budget", "delete_budget"}
"""One transaction each; the campaign of budgets replaces them beside workers that are killed."""
OF_EFFECTS = {"effect", "settle_effect"}
"""The campaign of effects kills its workers in them, and counts what happened in the world outside."""


def killed(
    database: CommittedDatabase, seeds: Sequence[int], **options: Any
) -> tuple[Counter[str], list[tuple[int, str]]]:
    """Kill writers of several stories at a time: half of a kill is waiting for another process."""
    parts = [seeds[first::_DRIVERS] for first in range(min(_DRIVERS, len(seeds)))]
    # Not a function of this module: what it imports would be copied with each fork.
    outcomes = run_in_processes(
        partial(kill_writers, **options),
        [(database.alias, database.tenant, part) for part in parts],
        timeout=300 + 60 * len(seeds),
    )
    counts: Counter[str] = Counter()
    faults = []
    for part, found in (outcome.unwrap() for outcome in outcomes):
        counts += part
        faults += found
    return counts, faults


@pytest.mark.campaign
def test_a_killed_writer_leaves_whole_writes(committed_db: CommittedDatabase) -> None:
    name = "sqlite" if committed_db.vendor == "sqlite" else "postgres"
    sizes = (2 * KILLS_PER_SEED, 10_000, 100_000)
    with campaign("killed_writers", name, sizes=sizes, per_seed=KILLS_PER_SEED) as made:
        for seeds in made.batches(_STORIES_AT_A_TIME):
            counts, faults = killed(committed_db, seeds)
            made.add(counts.pop("kills"), counts, faults)
        made.require_success()
    assert made.counts["killed within a write"], made.counts
    if made.trials >= 10_000:
        unkilled = [
            kind for story in STORIES.values() for kind in story.kinds if not made.counts[f"killed in {kind}"]
        ]
        assert unkilled == []


@pytest.mark.parametrize("faces_of", PLANTED, ids=lambda each: each.__name__)
def test_the_campaign_finds_a_planted_fault(committed_db: CommittedDatabase, faces_of: FacesOf) -> None:
    _, faults = killed(committed_db, range(1, 4), kinds=STEPS, faces_of=faces_of)
    assert faults
    assert all("AssertionError: after [" in error for _, error in faults), faults


def test_the_campaign_finds_nothing_in_steps_of_a_sound_store(committed_db: CommittedDatabase) -> None:
    counts, faults = killed(committed_db, range(1, 3), kinds=STEPS)
    assert (faults, counts["kills"]) == ([], 2 * KILLS_PER_SEED)


@pytest.mark.parametrize("name", STORIES)
def test_a_database_and_its_mirror_have_the_same_after_each_write(
    committed_db: CommittedDatabase, name: str
) -> None:
    story, faces = STORIES[name], Faces.of_database(committed_db.alias, committed_db.tenant)
    rows = Rows(committed_db.alias, committed_db.tenant, story.tables)
    story.begin(faces, KEY)
    mirror = mirror_of(story, committed_db.alias, f"{committed_db.tenant}-twin")
    for kind in random.Random(1).choices([*story.kinds], k=2 * len(story.kinds)):  # noqa: S311
        write(story, faces, kind)
        mirror.follow(kind, lambda states: len(states) - 1)
        found = public_contents(faces) if story.has_memory else rows.contents(rows.read())
        assert found == mirror.contents, kind


def test_no_write_is_left_out() -> None:
    known = {kind.split(": ")[-1] for story in STORIES.values() for kind in story.kinds}
    public = {
        name
        for each in (*CLASSES.values(), DjangoSaver, RunStateStore, RunStateClaim, *FRAMEWORK_CLASSES)
        for name, _ in inspect.getmembers(each, callable)
        if not name.startswith("_")
    }
    synchronous = {name for name in public if name[:1] != "a" or name[1:] not in public}
    assert synchronous - known - READS - MADE_OF_OTHERS - OF_BUDGETS - OF_EFFECTS == set()
