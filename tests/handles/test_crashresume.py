"""The loop of docs/effects.md, as it is printed there, under `crashresume`, an outside harness.

It crashes the agent right after each effect, before anything is stored, begins again, and compares what
happened with a run without crashes.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeAlias
from uuid import uuid4

import pytest
from asgiref.sync import async_to_sync
from crashresume import conform
from crashresume.core import Context

from helix_store.exceptions import NotApproved
from helix_store.stores import SessionHandle, Store
from tests.databases import CommittedDatabase
from tests.docs.test_examples import BLOCK, ROOT

JOBS: Final = ("job-1", "job-2", "job-3")
PAGE: Final[Path] = ROOT / "docs" / "effects.md"
AWAITED: Final = ("done", "not_done", "messages", "say", "end_turn")

Agent: TypeAlias = dict[str, Any]


def functions_of_the_page() -> dict[str, str]:
    """The source of each function that the page defines, by its name."""
    functions = {}
    for block in BLOCK.finditer(PAGE.read_text()):
        for node in ast.parse(block[1]).body:
            if isinstance(node, ast.FunctionDef):
                source = ast.get_source_segment(block[1], node)
                assert source is not None
                functions[node.name] = source
    return functions


def as_async(source: str) -> str:
    """A function of the page as the page says that it is written in an async function."""
    source = re.sub(r"^def ", "async def ", source, flags=re.MULTILINE)
    source = re.sub(r"^( *)with ", r"\1async with ", source, flags=re.MULTILINE)
    source = source.replace(": refund(turn", ": await refund(turn")
    calls = "|".join(AWAITED)
    return re.sub(
        rf"\b(turn|step|effect)\.({calls})\(([^()]*(?:\([^()]*\))?)\)", r"(await \1.a\2(\3))", source
    )


def asks_approvals(work: str) -> str:
    """The loop of the page, with the line of which the page says where it stands."""
    line = re.search(r"^( *)(?:await )?(?:\(await )?step\.a?say\(reply\)+$", work, re.MULTILINE)
    assert line is not None
    return work.replace(line[0], f"{line[0]}\n{line[1]}ask_approvals(step, reply)")


def model(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Ask for a refund, under another id each time, as models do, and say so afterwards."""
    last = messages[-1]
    if last["role"] == "tool":
        return {"role": "assistant", "content": f"Refunded. {last['content']}"}
    call = {"id": uuid4().hex, "name": "refund", "input": {"order": last["content"], "euros": 20}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


class Payments:
    """A service that makes each refund it is asked for, whatever its key. The harness dies after some."""

    def __init__(self, ctx: Context, refunded: dict[str, Any]) -> None:
        self.ctx = ctx
        self.refunded = refunded

    def refund(self, order: str, euros: int, idempotency_key: str) -> dict[str, str]:
        receipt = self.refunded[idempotency_key] = {"receipt": f"{order}: {euros} euros"}
        # The harness compares the keys of different sessions, so they do not contain the session.
        self.ctx.effect("refund", euros, key=order)
        return receipt


def agent_of(ctx: Context, refunded: dict[str, Any], refund: str, *, is_async: bool = False) -> Agent:
    """The names of the page, with a function of it as ``refund``, and a service that counts."""
    functions = functions_of_the_page()
    work = functions["work"]
    agent: Agent = {
        "model": model,
        "payments": Payments(ctx, refunded),
        "NotApproved": NotApproved,
        "timedelta": timedelta,
    }
    if refund == "approved_refund":
        work = asks_approvals(work)
    sources = [functions["ask"], functions["ask_approvals"]]
    sources += [as_async(each) if is_async else each for each in (functions[refund], work)]
    for source in sources:
        exec(source, agent)  # noqa: S102  our own documentation
    agent["refund"] = agent[refund]
    if is_async:
        agent["work"] = async_to_sync(agent["work"])
    return agent


class Support:
    """An agent that refunds an order in each job. It stands for the people who approve and settle, too."""

    def __init__(self, ctx: Context, store: Store, agent: Agent) -> None:
        if not store.sessions.session_exists(ctx.run_id):
            store.new_session(ctx.run_id, agent_type="support")
        self.store = store
        self.session: SessionHandle = store.session(ctx.run_id)
        self.work: Callable[[SessionHandle], None] = agent["work"]
        self.refunded: dict[str, Any] = agent["payments"].refunded

    def step(self, job: str) -> None:
        if job not in [message["content"] for message in self.session.messages()]:
            self.session.say({"role": "user", "content": job})
        self.work(self.session)
        while self._decides():
            self.work(self.session)

    def _decides(self) -> bool:
        """Approve what waits, and settle what nobody knows; return whether there was anything."""
        sessions, session_id = self.store.sessions, self.session.id
        calls = [
            call_id
            for call_id, call in self.session.load().pending_client_tool_calls.items()
            if "submitted_at" not in call
        ]
        for call_id in calls:
            sessions.submit_tool_result(session_id, call_id, approved=True, approval_id=call_id, actor="ann")
        unknown = sessions.list_effects(session_id, states=["unknown"]).items
        for effect in unknown:
            receipt = self.refunded.get(effect.key)
            sessions.settle_effect(session_id, effect.id, done=receipt is not None, result=receipt)
        return bool(calls or unknown)

    def state(self) -> list[tuple[str, str]]:
        return [(message["role"], message["content"]) for message in self.session.messages()]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("refund", ["refund", "approved_refund", "reconciled_refund"])
def test_no_effect_of_the_documented_loop_is_repeated_or_lost(
    committed_db: CommittedDatabase, refund: str, is_async: bool
) -> None:
    store = Store(committed_db.alias, tenant=committed_db.tenant)
    services: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    report = conform(
        lambda ctx: Support(ctx, store, agent_of(ctx, services[ctx.run_id], refund, is_async=is_async)),
        inputs=JOBS,
    )
    assert report.crash_points == len(JOBS)
    assert report.passed, str(report)


def test_nobody_has_to_settle_what_the_service_can_tell(committed_db: CommittedDatabase) -> None:
    store = Store(committed_db.alias, tenant=committed_db.tenant)
    services: defaultdict[str, dict[str, Any]] = defaultdict(dict)

    class Alone(Support):
        def _decides(self) -> bool:
            return False

    report = conform(
        lambda ctx: Alone(ctx, store, agent_of(ctx, services[ctx.run_id], "reconciled_refund")), inputs=JOBS
    )
    assert report.crash_points == len(JOBS)
    assert report.passed, str(report)


def test_the_harness_finds_what_an_effect_in_the_step_of_its_model_repeats(
    committed_db: CommittedDatabase,
) -> None:
    """The page says why the effects come before the step."""
    store = Store(committed_db.alias, tenant=committed_db.tenant)

    def agent(ctx: Context) -> Agent:
        names = agent_of(ctx, {}, "refund")

        def work(session: SessionHandle) -> None:
            with session.turn() as turn:
                while turn.is_active:
                    with turn.step() as step:
                        reply = model(turn.messages())
                        for call in reply.get("tool_calls", []):
                            step.say(reply, {"role": "tool", "content": names["refund"](turn, call)})
                        step.end_turn()

        return {**names, "work": work}

    report = conform(lambda ctx: Support(ctx, store, agent(ctx)), inputs=JOBS)
    assert [finding.kind for finding in report.findings] == ["effect_replayed"] * len(JOBS)
