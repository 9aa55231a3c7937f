"""An erased session stays erased: no write of an adapter that is still running creates it again."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec
from typing import Any, Final, cast
from uuid import uuid4

import pytest
from asgiref.sync import async_to_sync
from django.test import override_settings
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, LLMResult
from pydantic_ai.conversation import Conversation as PydanticConversation
from strands.types.session import Session as StrandsSession
from strands.types.session import SessionType

from helix_store import DatabaseStateStore, SnapshotCheckpointer, erase, expired_session_cleanup
from helix_store.adapters import LockedSession, SessionAdapter, session_id_for
from helix_store.contrib.claude_agent import DjangoSessionStore
from helix_store.contrib.langgraph import DjangoSaver, UsageRecorder
from helix_store.contrib.openai_agents import DjangoSession, RunStateStore
from helix_store.contrib.pydantic_ai import DjangoConversationStore
from helix_store.contrib.strands import DjangoSessionRepository, DjangoStorage
from helix_store.core import moments
from helix_store.exceptions import InvalidPayload, SessionEnded, SessionErased
from helix_store.items import ItemLog
from helix_store.models import Session, Tombstone
from tests.databases import CommittedDatabase
from tests.frameworks.langgraph.graphs import config_of, put
from tests.frameworks.pydantic_ai.conversations import turn
from tests.transfer.files import exported, imported

Options = dict[str, Any]
Write = Callable[[str, Options], Any]
KEY: Final[Any] = {"project_key": "p", "session_id": "s"}


def claude(alias: str, options: Options) -> None:
    entry: Any = {"type": "user", "message": {"role": "user", "content": "hi"}}
    async_to_sync(DjangoSessionStore(alias, **options).append)(KEY, [entry])


def items(alias: str, options: Options) -> None:
    ItemLog("s", using=alias, **options).append([1])


def langgraph(alias: str, options: Options) -> None:
    put(DjangoSaver(alias, **options), config_of("s"), {"log": [1]})


def langgraph_async(alias: str, options: Options) -> None:
    saver = DjangoSaver(alias, **options)
    async_to_sync(saver.aput_writes)(config_of("s", "1"), [("log", 2)], "task")


def langgraph_usage(alias: str, options: Options) -> None:
    recorder, run_id = UsageRecorder(alias, **options), uuid4()
    usage: Any = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
    said = ChatGeneration(message=AIMessage("hi", usage_metadata=usage))
    recorder.on_chat_model_start({}, [], run_id=run_id, metadata={"thread_id": "s"})
    recorder.on_llm_end(LLMResult(generations=[[said]]), run_id=run_id)


def openai(alias: str, options: Options) -> None:
    session = DjangoSession("s", using=alias, **options)
    async_to_sync(session.add_items)(cast("Any", [{"role": "user", "content": "hi"}]))


def openai_run_state(alias: str, options: Options) -> None:
    RunStateStore(alias, **options).save("s", "{}")


def pydantic_ai(alias: str, options: Options) -> None:
    store = DjangoConversationStore(alias, **options)
    conversation = PydanticConversation(conversation_id="s")
    turn(conversation, "hi")
    async_to_sync(store.save)(conversation)


def strands(alias: str, options: Options) -> None:
    repository = DjangoSessionRepository(alias, **options)
    repository.create_session(StrandsSession(session_id="s", session_type=SessionType.AGENT))


def strands_storage(alias: str, options: Options) -> None:
    async_to_sync(DjangoStorage(alias, **options).write)("session/s/x", b"{}")


def another_package(alias: str, options: Options) -> None:
    def write(session: LockedSession) -> None:
        assert session.session_id == "s"

    SessionAdapter("other", alias, **options).write("s", write)


def another_package_creates(alias: str, options: Options) -> None:
    SessionAdapter("other", alias, **options).ensure("s")


def adk(alias: str, options: Options) -> None:
    from helix_store.contrib.google_adk import DjangoSessionService

    service = DjangoSessionService(alias, **options)
    async_to_sync(service.create_session)(app_name="a", user_id="ada", session_id="s")


def agent_framework(alias: str, options: Options) -> None:
    from agent_framework import AgentSession

    from helix_store.contrib.agent_framework import DjangoSessionStore

    async_to_sync(DjangoSessionStore(alias, **options).set)("s", AgentSession(session_id="s"))


def _has(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


WRITES: Final[dict[Write, str]] = {
    claude: session_id_for("p", "s"),
    **dict.fromkeys(
        (
            items,
            langgraph,
            langgraph_async,
            langgraph_usage,
            openai,
            openai_run_state,
            pydantic_ai,
            strands,
            strands_storage,
            another_package,
            another_package_creates,
        ),
        "s",
    ),
    **({adk: session_id_for("google_adk", "a", "ada", "s")} if _has("google.adk") else {}),
    **({agent_framework: "s"} if _has("agent_framework") else {}),
}
"""A write of each adapter that creates a session, and the id of the session."""


def sessions(db: CommittedDatabase) -> list[str]:
    rows = Session.objects.using(db.alias).filter(tenant=db.tenant)
    return list(rows.values_list("session_id", flat=True))


def outcome_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as exc:  # noqa: BLE001  the table judges it
        return type(exc).__name__
    return "stored"


@pytest.mark.thorough
def test_an_adapter_does_not_create_an_erased_session_again(committed_db: CommittedDatabase) -> None:
    store, options = (
        DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant),
        {"tenant": committed_db.tenant},
    )
    wrong = {}
    for write, session_id in WRITES.items():

        def writes(recreate: bool, write: Write = write) -> str:
            return outcome_of(lambda: write(committed_db.alias, {**options, "recreate": recreate}))

        store.create_session(session_id, agent_type="t", user_id="ada")
        assert erase(using=committed_db.alias, user_id="ada", tenant=committed_db.tenant).complete
        found: list[Any] = [writes(False), sessions(committed_db), writes(True), sessions(committed_db)]
        # An explicit creation, of the application, takes the id again.
        erase(using=committed_db.alias, session_id=session_id, tenant=committed_db.tenant, force=True)
        found.append(writes(False))
        store.create_session(session_id, agent_type="t")
        found.append(writes(False))
        erase(using=committed_db.alias, tenant=committed_db.tenant, force=True)
        found.append(writes(False))
        Tombstone.objects.using(committed_db.alias).filter(tenant=committed_db.tenant).delete()
        expected = ["SessionErased", [], "stored", [session_id], "SessionErased", "stored", "SessionErased"]
        if found != expected:
            wrong[write.__name__] = found
    assert not wrong


def test_an_erased_thread_of_snapshots_is_not_created_again(committed_db: CommittedDatabase) -> None:
    snapshots = SnapshotCheckpointer(committed_db.alias, tenant=committed_db.tenant)
    snapshots.put("s", {"version": 1})
    assert erase(using=committed_db.alias, session_id="s", tenant=committed_db.tenant).complete
    with pytest.raises(SessionErased) as refused:
        snapshots.put("s", {"version": 1})
    assert isinstance(refused.value, SessionEnded)
    assert (refused.value.session_id, refused.value.status) == ("s", "erased")


def test_other_deletions_leave_no_tombstone(committed_db: CommittedDatabase) -> None:
    options = {"tenant": committed_db.tenant}
    openai(committed_db.alias, options)
    erase(using=committed_db.alias, session_id="s", tenant=committed_db.tenant, dry_run=True)
    DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant).delete_session("s")
    openai(committed_db.alias, options)
    with override_settings(HELIX_STORE={"TOMBSTONE_DAYS": 0}):
        assert erase(using=committed_db.alias, session_id="s", tenant=committed_db.tenant).complete
    openai(committed_db.alias, options)
    assert sessions(committed_db) == ["s"]


def test_a_tombstone_has_no_name_and_is_removed_after_its_days(committed_db: CommittedDatabase) -> None:
    options = {"tenant": committed_db.tenant}
    openai(committed_db.alias, options)
    erase(using=committed_db.alias, session_id="s", tenant=committed_db.tenant)
    rows = Tombstone.objects.using(committed_db.alias).filter(tenant=committed_db.tenant)
    (digest,) = rows.values_list("digest", flat=True)
    assert len(digest) == 64
    left = []
    for days in (29, 31):
        later = moments.now() + timedelta(days=days)
        expired_session_cleanup(using=committed_db.alias, now=later)
        left.append(rows.count())
    assert left == [1, 0]
    openai(committed_db.alias, options)


def test_the_tombstones_of_an_erased_tenant_do_not_name_it(committed_db: CommittedDatabase) -> None:
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    for session_id in ("erased before", "s"):
        store.create_session(session_id, agent_type="t")
    erase(using=committed_db.alias, session_id="erased before", tenant=committed_db.tenant)
    assert erase(using=committed_db.alias, tenant=committed_db.tenant).complete
    rows = Tombstone.objects.using(committed_db.alias)
    assert not rows.filter(tenant=committed_db.tenant).exists()
    for session_id in ("erased before", "s"):
        with pytest.raises(SessionErased):
            ItemLog(session_id, using=committed_db.alias, tenant=committed_db.tenant).append([1])
    # Another tenant may have a session with the same id.
    ItemLog("s", using=committed_db.alias, tenant=f"other {committed_db.tenant}").append([1])


def test_an_export_of_the_tenant_keeps_its_sessions_erased(committed_db: CommittedDatabase) -> None:
    options = {"tenant": committed_db.tenant}
    openai(committed_db.alias, options)
    erase(using=committed_db.alias, session_id="s", tenant=committed_db.tenant)
    data = exported(committed_db)
    Tombstone.objects.using(committed_db.alias).filter(tenant=committed_db.tenant).delete()
    imported(committed_db, data)
    with pytest.raises(SessionErased):
        openai(committed_db.alias, options)


def test_recreate_is_true_or_false(committed_db: CommittedDatabase) -> None:
    with pytest.raises(InvalidPayload) as refused:
        DjangoSaver(committed_db.alias, recreate=cast("Any", "yes"))
    assert refused.value.path == "/recreate"
