"""The atomic step: alone, with staged changes, of 16 KB, inside a caller's block, beside its peers."""

from __future__ import annotations

from functools import partial

from benchmarks.evidence import Evidence
from benchmarks.figures import Target
from benchmarks.operations import WithSettings
from benchmarks.paths.coordination import locks
from benchmarks.peers import ADD_ITEMS, PUT, PUT_AND_WRITE, peer_tables
from benchmarks.pgbench import Script
from benchmarks.races import Client, Comparison, Contestant, Limit, Race
from benchmarks.reference import reference_sessions
from benchmarks.server import commits_that_take
from benchmarks.sessions import WORKERS, live_sessions
from benchmarks.steps import Step, StepInFull, StepInsideAtomic, step_evidence, step_limit, used_staging

__all__ = ["CASES"]

LANGGRAPH = "LangGraph put + put_writes"
LANGGRAPH_PUT = "LangGraph put alone"
OPENAI_AGENTS = "SQLAlchemySession.add_items"

BARE_COMMIT = Limit(
    script=Script(
        choose="\\set s 1 + :k % 200", sql="UPDATE ref_lock SET token = token + 1 WHERE name = 'lock-' || :s;"
    ),
    evidence=Evidence("SELECT sum(token) FROM ref_lock", (1,)),
)
CONTESTANTS: dict[str, Contestant] = {
    "limit": step_limit(),
    "ours": Client(operation=Step, evidence=step_evidence()),
    LANGGRAPH: PUT_AND_WRITE,
    LANGGRAPH_PUT: PUT,
    OPENAI_AGENTS: ADD_ITEMS,
}
NEEDS = [live_sessions, reference_sessions, locks, peer_tables]
ALIASES = ("default", "peers")


def _staged_race(path: str, kib: int, target: Target) -> Race:
    return Race(
        contestants={
            "limit": step_limit(kib, is_staged=True),
            "ours": Client(
                operation=partial(Step, kib=kib, is_staged=True), evidence=step_evidence(is_staged=True)
            ),
            "elsewhere": Client(
                operation=partial(Step, kib=kib, is_staged_elsewhere=True),
                evidence=step_evidence(is_staged=True),
            ),
        },
        comparisons=[
            Comparison(path=path, target=target),
            Comparison(path=f"{path} by another process", of="elsewhere"),
        ],
        needs=[live_sessions, reference_sessions, used_staging],
    )


CASES = [
    Race(
        contestants={
            **CONTESTANTS,
            "inside atomic()": Client(operation=StepInsideAtomic, evidence=step_evidence()),
            "portable": Client(
                operation=partial(WithSettings, make=Step, FAST_PATHS=False), evidence=step_evidence()
            ),
            "in full": Client(operation=StepInFull, evidence=step_evidence()),
            "bare commit": BARE_COMMIT,
        },
        comparisons=[
            Comparison(
                path="bare commit of one small row, by pgbench",
                of="bare commit",
                to=None,
                note="what this disk allows just now",
            ),
            Comparison(path="step 4 KB", target=Target(0.65, 0.75)),
            Comparison(path="step 4 KB, the whole state stored", of="in full"),
            Comparison(path="step 4 KB inside atomic()", of="inside atomic()", target=Target(0.45, 0.55)),
            Comparison(path="step 4 KB, portable form", of="portable", target=Target(0.25, 0.40)),
            Comparison(path=f"step against {LANGGRAPH}", to=LANGGRAPH, target=Target(1.5, 1.8)),
            Comparison(path=f"step against {LANGGRAPH_PUT}", to=LANGGRAPH_PUT),
            Comparison(path=f"step against {OPENAI_AGENTS}", to=OPENAI_AGENTS, target=Target(4, 5)),
        ],
        needs=NEEDS,
        aliases=ALIASES,
    ),
    _staged_race("step 4 KB, 2 staged", 4, Target(0.50, 0.75)),
    _staged_race("step 16 KB, 2 staged", 16, Target(1.0, 1.3)),
    Race(
        contestants=CONTESTANTS,
        comparisons=[
            Comparison(path=f"step 4 KB, {WORKERS} processes", target=Target(0.55, 0.65)),
            Comparison(
                path=f"step against {LANGGRAPH}, {WORKERS} processes", to=LANGGRAPH, target=Target(1.4, 1.6)
            ),
            Comparison(path=f"step against {OPENAI_AGENTS}, {WORKERS} processes", to=OPENAI_AGENTS),
        ],
        needs=NEEDS,
        aliases=ALIASES,
        workers=WORKERS,
    ),
    Race(
        contestants=CONTESTANTS,
        comparisons=[
            Comparison(path="step 4 KB, commits take 1 ms more"),
            Comparison(
                path=f"step against {LANGGRAPH}, commits take 1 ms more",
                to=LANGGRAPH,
                target=Target(1.7, 1.85),
            ),
        ],
        needs=NEEDS,
        aliases=ALIASES,
        server=commits_that_take(1_000),
    ),
]
