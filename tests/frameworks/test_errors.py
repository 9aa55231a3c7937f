"""An error of an adapter during a run: does it reach the code that started the run?

The table of docs/frameworks.md, for each framework that is installed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import pytest
from agents import Agent, Runner, set_tracing_disabled
from claude_agent_sdk._internal.transcript_mirror_batcher import TranscriptMirrorBatcher
from django.test import override_settings

from example_project.frameworks.langgraph import travel_agent
from example_project.frameworks.openai_agents import ScriptedModel
from example_project.frameworks.strands import agent_of
from helix_store import DatabaseStateStore
from helix_store.adapters import session_id_for
from helix_store.contrib.claude_agent import DjangoSessionStore
from helix_store.contrib.langgraph import DjangoSaver
from helix_store.contrib.openai_agents import DjangoSession
from helix_store.contrib.pydantic_ai import DjangoConversationStore
from helix_store.contrib.strands import DjangoSessionRepository
from helix_store.exceptions import FencedOutError, HelixStoreError, LimitExceeded
from helix_store.stores import DatabaseLockManager
from tests.databases import CommittedDatabase
from tests.frameworks.pydantic_ai.conversations import turn

LONG: Final = "To Kyoto, please. " * 1_000
CLAUDE: Final = "7f1d6f0e-6f0e-4d0e-9a52-0f4d0f8a1c11"
Run = Callable[[CommittedDatabase, int | None], "Any"]


def langgraph(db: CommittedDatabase, token: int | None) -> None:
    saver = DjangoSaver(db.alias, tenant=db.tenant)
    if token is not None:
        saver = saver.claim_write_ownership("s")
        saver.claim_write_ownership("s")
    travel_agent(saver, "Yes.").invoke({"messages": [("user", LONG)]}, {"configurable": {"thread_id": "s"}})


def openai(db: CommittedDatabase, token: int | None) -> None:
    set_tracing_disabled(True)
    session = DjangoSession("s", using=db.alias, tenant=db.tenant, fencing_token=token)
    agent: Any = Agent(name="guide", model=ScriptedModel("Yes."))
    asyncio.run(Runner.run(agent, LONG, session=session))


def claude(db: CommittedDatabase, token: int | None) -> BaseException | None:
    store = DjangoSessionStore(db.alias, tenant=db.tenant, fencing_token=token)

    async def mirror() -> None:
        async def on_error(key: Any, error: str) -> None:
            assert error == str(store.failure)

        batcher = TranscriptMirrorBatcher(store, "/projects", on_error)
        message = {"role": "user", "content": LONG}
        entry: Any = {"type": "user", "uuid": "u1", "message": message, **dict.fromkeys(map(str, range(300)))}
        batcher.enqueue(f"/projects/p/{CLAUDE}.jsonl", [entry])
        await batcher.flush()

    asyncio.run(mirror())
    return store.failure


def pydantic_ai(db: CommittedDatabase, token: int | None) -> None:
    from pydantic_ai.conversation import Conversation

    store = DjangoConversationStore(db.alias, tenant=db.tenant, fencing_token=token)
    conversation = Conversation(conversation_id="s")
    turn(conversation, LONG)
    asyncio.run(store.save(conversation))


def strands(db: CommittedDatabase, token: int | None) -> None:
    agent_of("s", DjangoSessionRepository(db.alias, tenant=db.tenant, fencing_token=token))(LONG)


def google_adk(db: CommittedDatabase, token: int | None) -> None:
    adk: Any = pytest.importorskip("example_project.frameworks.google_adk", exc_type=ImportError)
    from helix_store.contrib.google_adk import DjangoSessionService

    async def run() -> None:
        known = {"app_name": adk.APP, "user_id": "ada", "session_id": "s"}
        await DjangoSessionService(db.alias, tenant=db.tenant).create_session(**known)
        service = DjangoSessionService(db.alias, tenant=db.tenant, fencing_token=token)
        await adk.ask(adk.runner_of(service), "ada", "s", LONG)

    asyncio.run(run())


def agent_framework(db: CommittedDatabase, token: int | None) -> None:
    framework: Any = pytest.importorskip("example_project.frameworks.agent_framework", exc_type=ImportError)
    from helix_store.contrib.agent_framework import DjangoHistoryProvider

    history = DjangoHistoryProvider(db.alias, tenant=db.tenant, fencing_token=token)
    agent = framework.guide(history)
    asyncio.run(agent.run(LONG, session=agent.create_session(session_id="s")))


def agent_framework_workflow(db: CommittedDatabase, token: int | None) -> BaseException | None:
    framework: Any = pytest.importorskip("example_project.frameworks.agent_framework", exc_type=ImportError)
    from helix_store.contrib.agent_framework import DjangoCheckpointStorage

    storage = _checkpoints(DjangoCheckpointStorage, framework, db, token)
    asyncio.run(framework.booking().run(LONG, checkpoint_storage=storage))
    return storage.failure  # type: ignore[no-any-return]


def agent_framework_storage(db: CommittedDatabase, token: int | None) -> None:
    framework: Any = pytest.importorskip("example_project.frameworks.agent_framework", exc_type=ImportError)
    from helix_store.contrib.agent_framework import DjangoCheckpointStorage

    storage = _checkpoints(DjangoCheckpointStorage, framework, db, token)
    try:
        asyncio.run(storage.run(framework.booking(), LONG))
    finally:
        assert storage.failure is not None


def _checkpoints(storage: Any, framework: Any, db: CommittedDatabase, token: int | None) -> Any:
    offer = framework.Offer
    allowed = [f"{offer.__module__}:{offer.__qualname__}"]
    return storage("s", db.alias, tenant=db.tenant, fencing_token=token, allowed_checkpoint_types=allowed)


RUNS: Final[dict[Run, tuple[str, str]]] = {
    langgraph: ("s", "is raised"),
    openai: ("s", "is raised"),
    claude: (session_id_for("p", CLAUDE), "is kept"),
    pydantic_ai: ("s", "is raised"),
    strands: ("s", "is raised"),
    google_adk: (session_id_for("google_adk", "travel", "ada", "s"), "is raised"),
    agent_framework: ("s", "is raised"),
    agent_framework_workflow: ("s", "is kept"),
    agent_framework_storage: ("s", "is raised"),
}
"""A run of each framework, its session in this store, and how its caller learns of an error."""


def _outcome(run: Run, db: CommittedDatabase, token: int | None, error: type[HelixStoreError]) -> str:
    try:
        kept = run(db, token)
    except Exception as exc:  # noqa: BLE001  it is looked into
        seen: list[BaseException | None] = [exc, exc.__cause__, exc.__context__]
        return "is raised" if any(isinstance(each, error) for each in seen) else repr(exc)
    return "is kept" if isinstance(kept, error) else f"nobody knows: {kept!r}"


@pytest.mark.thorough
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_an_error_reaches_the_caller(committed_db: CommittedDatabase, run: Run) -> None:
    name, expected = RUNS[run]
    # The stand-in of Claude's entry is also too large for this limit.
    small = override_settings(HELIX_STORE={"LIMITS": {"max_state_bytes": 1_000}})
    everywhere: list[tuple[type[HelixStoreError], AbstractContextManager[object]]] = [
        (LimitExceeded, small),
        (FencedOutError, nullcontext()),
    ]
    locks = DatabaseLockManager(committed_db.alias, tenant=committed_db.tenant)
    found = {}
    for error, settings in everywhere:
        token = None
        if error is FencedOutError:
            superseded = locks.acquire(name)
            assert superseded is not None
            locks.take_over(name)
            token = superseded.fencing_token
            _forget(committed_db, name)
        with settings:
            found[error.__name__] = _outcome(run, committed_db, token, error)
    assert found == {"LimitExceeded": expected, "FencedOutError": expected}


def _forget(db: CommittedDatabase, name: str) -> None:
    """Delete what the first run may have stored."""
    DatabaseStateStore(db.alias, tenant=db.tenant).delete_session(name)
