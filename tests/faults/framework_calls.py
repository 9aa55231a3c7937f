"""The adapters of frameworks, for faults in their statements."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, cast

from agents import Runner, set_tracing_disabled
from asgiref.sync import async_to_sync
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.store.base import PutOp
from pydantic_ai.conversation import Conversation
from strands.types.session import Session, SessionAgent, SessionMessage, SessionType

from helix_store.contrib.claude_agent import DjangoSessionStore
from helix_store.contrib.langgraph import DjangoSaver, DjangoStore
from helix_store.contrib.openai_agents import DjangoSession, RunStateClaim, RunStateStore
from helix_store.contrib.pydantic_ai import DjangoConversationStore
from helix_store.contrib.strands import DjangoSessionRepository
from helix_store.core.ids import new_id
from tests.databases import CommittedDatabase
from tests.frameworks.langgraph.graphs import config_of, put_chain
from tests.frameworks.openai_agents.models import talking_agent
from tests.frameworks.pydantic_ai.conversations import saved, store_of, turn

__all__ = ["CALLS", "CLASSES"]

set_tracing_disabled(True)

Call = Callable[[], object]
Prepare = Callable[[CommittedDatabase], Call]


def _then(call: Callable[..., Any], told: Callable[[Any], object], *arguments: Any) -> Call:
    """A call whose result is random, or shows where it is in memory: ``told`` is what must be the same."""
    return lambda: told(call(*arguments))


# --- OpenAI Agents SDK -----------------------------------------------------------------------------

_ASKED: Final[Any] = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]


def _session(db: CommittedDatabase) -> DjangoSession:
    session = DjangoSession("chat", using=db.alias, tenant=db.tenant)
    async_to_sync(session.add_items)(_ASKED * 2)
    return session


def _of_session(name: str, *arguments: Any) -> Prepare:
    return lambda db: partial(async_to_sync(getattr(_session(db), name)), *arguments)


def _of_branches(name: str, *arguments: Any) -> Prepare:
    """In a session with a second branch; the current one is the first."""

    def prepare(db: CommittedDatabase) -> Call:
        session = _session(db)
        async_to_sync(session.create_branch_from_turn)(2, "other")
        async_to_sync(session.switch_to_branch)("main")
        return partial(async_to_sync(getattr(session, name)), *arguments)

    return prepare


def _store_usage(db: CommittedDatabase) -> Call:
    session = _session(db)
    result = async_to_sync(Runner.run)(talking_agent("hello"), "hi", session=session)
    return partial(async_to_sync(session.store_run_usage), result)


_SESSION: Final[dict[str, Prepare]] = {
    "add_items": _of_session("add_items", _ASKED),
    "get_items": _of_session("get_items"),
    "pop_item": _of_session("pop_item"),
    "clear_session": _of_session("clear_session"),
    "create_branch_from_turn": _of_session("create_branch_from_turn", 2, "new"),
    "create_branch_from_content": _of_session("create_branch_from_content", "one", "new"),
    "switch_to_branch": _of_branches("switch_to_branch", "other"),
    "delete_branch": _of_branches("delete_branch", "other"),
    "list_branches": _of_branches("list_branches"),
    "get_conversation_turns": _of_session("get_conversation_turns"),
    "get_conversation_by_turns": _of_session("get_conversation_by_turns"),
    "get_tool_usage": _of_session("get_tool_usage"),
    "find_turns_by_content": _of_session("find_turns_by_content", "one"),
    "store_run_usage": _store_usage,
    "get_session_usage": _of_session("get_session_usage"),
    "get_turn_usage": _of_session("get_turn_usage", 1),
}


def _run_states(db: CommittedDatabase) -> RunStateStore:
    store = RunStateStore(db.alias, tenant=db.tenant)
    store.save("chat", "{}", state_id="state")
    return store


def _of_run_states(name: str, *arguments: Any, **options: Any) -> Prepare:
    return lambda db: partial(getattr(_run_states(db), name), "chat", *arguments, **options)


def _of_claim(name: str) -> Prepare:
    def prepare(db: CommittedDatabase) -> Call:
        claim = _run_states(db).claim("chat", "state", resumer="me")
        assert claim is not None
        call: Call = getattr(claim, name)
        return call

    return prepare


_RUN_STATES: Final[dict[str, Prepare]] = {
    "save": _of_run_states("save", "{}", state_id="new"),
    "load": _of_run_states("load", "state"),
    "waiting": _of_run_states("waiting"),
    "claim": _of_run_states("claim", "state", resumer="me"),
    "delete": _of_run_states("delete", "state"),
}
_RUN_STATE_CLAIM: Final = {name: _of_claim(name) for name in ("refresh", "done", "release")}

# --- LangGraph -------------------------------------------------------------------------------------


def _saver(db: CommittedDatabase) -> DjangoSaver:
    saver = DjangoSaver(db.alias, tenant=db.tenant)
    put_chain(saver, "thread", 2, run_id="run")
    return saver


def _of_saver(name: str, *arguments: Any, **options: Any) -> Prepare:
    return lambda db: partial(getattr(_saver(db), name), *arguments, **options)


def _put(db: CommittedDatabase, *, thread: str) -> Call:
    saver, checkpoint = _saver(db), empty_checkpoint()
    checkpoint["channel_values"] = {"log": [1, 2, 3]}
    checkpoint["channel_versions"] = {"log": "0009"}
    metadata: Any = {"source": "loop", "step": 9, "parents": {}}
    return partial(saver.put, config_of(thread), checkpoint, metadata, {"log": "0009"})


def _put_writes(db: CommittedDatabase) -> Call:
    saver = _saver(db)
    config = next(iter(saver.list(config_of("thread")))).config
    return partial(saver.put_writes, config, [("log", 1), ("other", "two")], "task")


def _check(db: CommittedDatabase) -> Call:
    return _saver(db).claim_write_ownership("thread").check_write_ownership


_SAVER: Final[dict[str, Prepare]] = {
    "put": partial(_put, thread="thread"),
    "put in a new thread": partial(_put, thread="new"),
    "put_writes": _put_writes,
    "get": _of_saver("get", config_of("thread")),
    "get_tuple": _of_saver("get_tuple", config_of("thread")),
    "list": lambda db: _then(_saver(db).list, lambda found: len(list(found)), config_of("thread")),
    "get_delta_channel_history": _of_saver(
        "get_delta_channel_history", config=config_of("thread"), channels=["log"]
    ),
    "copy_thread": _of_saver("copy_thread", "thread", "copy"),
    "delete_thread": _of_saver("delete_thread", "thread"),
    "delete_for_runs": _of_saver("delete_for_runs", ["run"]),
    "prune": _of_saver("prune", ["thread"]),
    "claim_write_ownership": lambda db: _then(_saver(db).claim_write_ownership, bool, "thread"),
    "check_write_ownership": _check,
}


def _memories(db: CommittedDatabase) -> DjangoStore:
    store = DjangoStore(using=db.alias, tenant=db.tenant)
    store.put(("users", "ada"), "key", {"n": 1})
    return store


def _of_memories(name: str, *arguments: Any, **options: Any) -> Prepare:
    return lambda db: partial(getattr(_memories(db), name), *arguments, **options)


_MEMORIES: Final[dict[str, Prepare]] = {
    "batch": _of_memories("batch", [PutOp(("users",), "a", {"n": 1}), PutOp(("users", "ada"), "key", None)]),
    "put": _of_memories("put", ("users", "ada"), "key", {"n": 2}),
    "get": _of_memories("get", ("users", "ada"), "key"),
    "delete": _of_memories("delete", ("users", "ada"), "key"),
    "delete_namespace": _of_memories("delete_namespace", ("users",)),
    "search": _of_memories("search", ("users",), filter={"n": 1}),
    "list_namespaces": _of_memories("list_namespaces"),
    "sweep_ttl": _of_memories("sweep_ttl"),
}

# --- Pydantic AI -----------------------------------------------------------------------------------


def _of_conversations(name: str, *arguments: Any, **options: Any) -> Prepare:
    def prepare(db: CommittedDatabase) -> Call:
        saved(db, "talk", "hello")
        return partial(async_to_sync(getattr(store_of(db), name)), *arguments, **options)

    return prepare


def _save(db: CommittedDatabase, *, name: str) -> Call:
    """A conversation object goes on where it is stored, so each repeat begins with another one."""
    saved(db, "talk", "hello")
    store = store_of(db)

    def save() -> object:
        loaded = async_to_sync(store.load)(name) or Conversation(conversation_id=name)
        turn(loaded, "more")
        return len(async_to_sync(store.save)(loaded))

    return save


def _write_record(db: CommittedDatabase) -> Call:
    saved(db, "talk", "hello")
    store = store_of(db)
    record = async_to_sync(store.read_record)("talk")
    assert record is not None
    revision = record.revision
    record.revision = new_id()
    return partial(async_to_sync(store.write_record), record, expected_revision=revision)


def _branch(db: CommittedDatabase) -> Call:
    talk = saved(db, "talk", "hello")
    branch = partial(store_of(db).branch, "talk", at=1, expected_revision=talk.revision)
    return _then(async_to_sync(branch), bool)


def _delete_record(db: CommittedDatabase) -> Call:
    saved(db, "talk", "hello")
    store = store_of(db)
    record = async_to_sync(store.read_record)("talk")
    assert record is not None
    return partial(async_to_sync(store.delete_record), "talk", expected_revision=record.revision)


def _entry(db: CommittedDatabase, *, name: str) -> Call:
    saved(db, "talk", "hello")
    store = store_of(db)
    record = async_to_sync(store.read_record)("talk")
    assert record is not None
    return lambda: bool(async_to_sync(getattr(store, name))(record.head_id))


_CONVERSATIONS: Final[dict[str, Prepare]] = {
    "save": partial(_save, name="talk"),
    "save of a new one": partial(_save, name="new"),
    "load": lambda db: _then(_of_conversations("load", "talk")(db), bool),
    "load_entries": lambda db: _then(_of_conversations("load_entries", "talk")(db), len),
    "branch": _branch,
    "fork": lambda db: _then(_of_conversations("fork", "talk", new_conversation_id="new")(db), bool),
    "list_conversations": _of_conversations("list_conversations"),
    "delete": _of_conversations("delete", "talk"),
    "write_record": _write_record,
    "delete_record": _delete_record,
    "read_record": _of_conversations("read_record", "talk"),
    "read_records": _of_conversations("read_records"),
    "read_entry": partial(_entry, name="read_entry"),
    "read_history": partial(_entry, name="read_history"),
}

# --- Strands ---------------------------------------------------------------------------------------


def _agent(name: str = "guide") -> SessionAgent:
    return SessionAgent(agent_id=name, state={"n": 1}, conversation_manager_state={})


def _message(number: int, text: str = "hello") -> SessionMessage:
    content: Any = {"role": "user", "content": [{"text": text}]}
    return SessionMessage(message=content, message_id=number)


def _repository(db: CommittedDatabase) -> DjangoSessionRepository:
    repository = DjangoSessionRepository(db.alias, tenant=db.tenant)
    repository.create_session(Session(session_id="trip", session_type=SessionType.AGENT))
    repository.create_agent("trip", _agent())
    repository.create_message("trip", "guide", _message(0))
    return repository


_SWARM: Final = SimpleNamespace(id="swarm", serialize_state=lambda: {"id": "swarm", "n": 1})


def _updated_swarm(db: CommittedDatabase) -> Call:
    repository, swarm = _repository(db), cast("Any", _SWARM)
    repository.create_multi_agent("trip", swarm)
    return partial(repository.update_multi_agent, "trip", swarm)


def _of_repository(name: str, *arguments: Any) -> Prepare:
    return lambda db: partial(getattr(_repository(db), name), *arguments)


_REPOSITORY: Final[dict[str, Prepare]] = {
    "create_session": _of_repository(
        "create_session", Session(session_id="new", session_type=SessionType.AGENT)
    ),
    "read_session": _of_repository("read_session", "trip"),
    "delete_session": _of_repository("delete_session", "trip"),
    "create_agent": _of_repository("create_agent", "trip", _agent("other")),
    "read_agent": _of_repository("read_agent", "trip", "guide"),
    "update_agent": _of_repository("update_agent", "trip", _agent()),
    "create_message": _of_repository("create_message", "trip", "guide", _message(1)),
    "read_message": _of_repository("read_message", "trip", "guide", 0),
    "update_message": _of_repository("update_message", "trip", "guide", _message(0, "changed")),
    "list_messages": _of_repository("list_messages", "trip", "guide"),
    "create_multi_agent": _of_repository("create_multi_agent", "trip", _SWARM),
    "read_multi_agent": _of_repository("read_multi_agent", "trip", "swarm"),
    "update_multi_agent": _updated_swarm,
}

# --- Claude Agent SDK ------------------------------------------------------------------------------

_KEY: Final[Any] = {"project_key": "-srv-app", "session_id": "s1"}
_SAID: Final[Any] = {"type": "user", "message": {"role": "user", "content": "hello"}}


def _transcripts(db: CommittedDatabase) -> DjangoSessionStore:
    store = DjangoSessionStore(db.alias, tenant=db.tenant)
    async_to_sync(store.append)(_KEY, [_SAID])
    async_to_sync(store.append)({**_KEY, "subpath": "subagents/agent-1"}, [_SAID])  # type: ignore[typeddict-item]
    return store


def _of_transcripts(name: str, *arguments: Any) -> Prepare:
    return lambda db: partial(async_to_sync(getattr(_transcripts(db), name)), *arguments)


_TRANSCRIPTS: Final[dict[str, Prepare]] = {
    "append": _of_transcripts("append", _KEY, [_SAID, _SAID]),
    "load": _of_transcripts("load", _KEY),
    "list_sessions": _of_transcripts("list_sessions", "-srv-app"),
    "list_session_summaries": _of_transcripts("list_session_summaries", "-srv-app"),
    "delete": _of_transcripts("delete", _KEY),
    "list_subkeys": _of_transcripts("list_subkeys", _KEY),
}


CALLS: Final[dict[str, dict[str, Prepare]]] = {
    "OpenAI session": _SESSION,
    "OpenAI run states": _RUN_STATES,
    "OpenAI run state claim": _RUN_STATE_CLAIM,
    "LangGraph saver": _SAVER,
    "LangGraph store": _MEMORIES,
    "Pydantic AI conversations": _CONVERSATIONS,
    "Strands repository": _REPOSITORY,
    "Claude transcripts": _TRANSCRIPTS,
}
CLASSES: Final[dict[str, type[Any]]] = {
    "OpenAI session": DjangoSession,
    "OpenAI run states": RunStateStore,
    "OpenAI run state claim": RunStateClaim,
    "LangGraph saver": DjangoSaver,
    "LangGraph store": DjangoStore,
    "Pydantic AI conversations": DjangoConversationStore,
    "Strands repository": DjangoSessionRepository,
    "Claude transcripts": DjangoSessionStore,
}
NO_STATEMENT: Final = {
    DjangoSaver: {"from_conn_string", "get_next_version", "setup", "with_allowlist"},
    DjangoStore: {"from_conn_string", "setup", "start_ttl_sweeper", "stop_ttl_sweeper"},
    DjangoSessionRepository: {"session_id_of"},
    DjangoSessionStore: {"session_id_of"},
}
"""Methods that send nothing."""
