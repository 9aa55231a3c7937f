"""The session service of Google ADK, on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import pytest

pytest.importorskip("google.adk", reason="Google ADK is not installed: pip install google-adk")

from asgiref.sync import async_to_sync
from django.test.utils import CaptureQueriesContext
from google.adk.errors import StaleSessionError
from google.adk.errors.already_exists_error import AlreadyExistsError
from google.adk.errors.session_not_found_error import SessionNotFoundError
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.adk.platform import time as platform_time
from google.adk.sessions import InMemorySessionService, Session
from google.adk.sessions.base_session_service import GetSessionConfig
from google.genai import types

from helix_store import DatabaseStateStore, DatabaseUsageStore
from helix_store.cleanup import erase
from helix_store.contrib.google_adk import DjangoSessionService
from helix_store.core.usage import TokenCounts
from helix_store.exceptions import FencedOutError, IntegrityFault, LimitExceeded
from helix_store.models import Item, UsageEntry
from helix_store.models import Session as StoredSession
from helix_store.stores import DatabaseLockManager
from tests.databases import CommittedDatabase
from tests.frameworks.google_adk.differential import Differential
from tests.frameworks.retention import assert_deleted_thirty_days_after_the_last_write
from tests.processes import run_in_threads
from tests.transfer.files import exported, imported, lines_of

R = TypeVar("R")

APP, USER, SESSION = "weather", "ada-lovelace", "trip"
NAMED: dict[str, Any] = {"app_name": APP, "user_id": USER, "session_id": SESSION}


@pytest.fixture
def service(committed_db: CommittedDatabase) -> DjangoSessionService:
    return service_of(committed_db)


def service_of(db: CommittedDatabase, **options: Any) -> DjangoSessionService:
    return DjangoSessionService(db.alias, **{"tenant": db.tenant, **options})


def run(call: Coroutine[Any, Any, R]) -> R:
    return asyncio.run(call)


def event(text: str = "hi", author: str = "user", **fields: Any) -> Event:
    part = types.Part(text=text)
    return Event(author=author, content=types.Content(role="user", parts=[part]), **fields)


def delta(**state: Any) -> EventActions:
    return EventActions(state_delta={name.replace("__", ":"): value for name, value in state.items()})


def texts(session: Session | None) -> list[Any]:
    assert session is not None
    return [each.content.parts[0].text for each in session.events]  # type: ignore[union-attr,index]


def get(service: DjangoSessionService, **named: Any) -> Session:
    session = run(service.get_session(**{**NAMED, **named}))
    assert session is not None
    return session


def counted(db: CommittedDatabase) -> dict[str, int]:
    sessions = StoredSession.objects.using(db.alias).filter(tenant=db.tenant)
    return {
        "session": sessions.count(),
        "item": Item.objects.using(db.alias).filter(session__in=sessions).count(),
        "usage": UsageEntry.objects.using(db.alias).filter(tenant=db.tenant).count(),
    }


# --- The same as in memory -------------------------------------------------------------------------


@pytest.mark.thorough
def test_two_thousand_calls_give_what_they_give_in_memory(
    service: DjangoSessionService, committed_db: CommittedDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform_time, "get_time", iter(range(10**6)).__next__)
    differential = Differential(service, InMemorySessionService(), seed=len(committed_db.vendor))
    run(differential.run(2_000))
    assert differential.calls >= 2_000
    assert differential.events > 500


def test_sessions_are_listed_in_pages_from_the_least_recent_one(
    service: DjangoSessionService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("helix_store.contrib.google_adk.service._ROWS_PER_PAGE", 3)
    for number in range(8):
        run(service.create_session(**{**NAMED, "session_id": f"s{number}"}, state={"user:n": number}))
    run(service.append_event(get(service, session_id="s2"), event()))
    listed = run(service.list_sessions(app_name=APP)).sessions
    assert [each.id for each in listed] == ["s0", "s1", "s3", "s4", "s5", "s6", "s7", "s2"]
    assert {each.state["user:n"] for each in listed} == {7}
    assert not run(service.list_sessions(app_name=APP, user_id="grace")).sessions


def test_reads_take_one_statement_and_an_event_takes_five(sqlite_db: CommittedDatabase) -> None:
    service = service_of(sqlite_db)
    session = run(service.create_session(**NAMED, state={"app:a": 1, "user:u": 1}))
    counts = []
    for call, arguments in (
        (service.append_event, {"session": session, "event": event()}),
        (service.get_session, NAMED),
        (service.list_sessions, {"app_name": APP}),
        (service.get_user_state, {"app_name": APP, "user_id": USER}),
    ):
        with CaptureQueriesContext(sqlite_db.connection) as captured:
            async_to_sync(call)(**arguments)  # type: ignore[operator]
        sent = [each["sql"] for each in captured.captured_queries]
        counts.append(len([each for each in sent if not each.startswith(("BEGIN", "COMMIT"))]))
    assert counts == [5, 1, 2, 1]


@pytest.mark.parametrize("lane", ["user", "app"])
def test_a_state_that_cannot_be_stored_leaves_no_session_and_no_state(
    service: DjangoSessionService, committed_db: CommittedDatabase, settings: Any, lane: str
) -> None:
    session = run(service.create_session(**NAMED))
    before = counted(committed_db)
    state = {"user:u": 1, "app:a": 1, f"{lane}:large": "x" * 2_000}
    settings.HELIX_STORE = {**settings.HELIX_STORE, "LIMITS": {"max_state_bytes": 1_500}}
    with pytest.raises(LimitExceeded):
        run(service.create_session(app_name=APP, user_id=USER, state=state))
    with pytest.raises(LimitExceeded):
        run(service.append_event(session, event(actions=EventActions(state_delta=state))))
    assert counted(committed_db) == before
    assert texts(get(service)) == []


# --- State -----------------------------------------------------------------------------------------


def test_state_keeps_its_prefixes_and_is_shared_by_the_app_and_the_user(
    service: DjangoSessionService,
) -> None:
    session = run(service.create_session(**NAMED, state={"app:a": 1, "user:u": 1, "s": 1, "temp:t": 1}))
    assert session.state == {"app:a": 1, "user:u": 1, "s": 1}
    other = run(service.create_session(**{**NAMED, "session_id": "other"}))
    stranger = run(service.create_session(**{**NAMED, "user_id": "grace"}))
    assert other.state == {"app:a": 1, "user:u": 1}
    assert stranger.state == {"app:a": 1}
    run(service.append_event(other, event(actions=delta(app__a=2, user__u=2, s=2, temp__t=2))))
    assert other.state == {"app:a": 2, "user:u": 2, "s": 2, "temp:t": 2}
    assert get(service).state == {"app:a": 2, "user:u": 2, "s": 1}
    assert get(service, user_id="grace").state == {"app:a": 2}
    assert run(service.get_user_state(app_name=APP, user_id=USER)) == {"u": 2}
    assert run(service.get_user_state(app_name="another", user_id=USER)) == {}


# --- Writers ---------------------------------------------------------------------------------------


async def test_a_session_has_the_event_whose_append_was_cancelled_too_late(
    service: DjangoSessionService,
) -> None:
    session = await service.create_session(**NAMED)
    task = asyncio.ensure_future(service.append_event(session, event("one", actions=delta(a=1))))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await service.append_event(session, event("two"))
    stored = await service.get_session(**NAMED)
    assert texts(session) == texts(stored) == ["one", "two"]
    assert session.state == {"a": 1}


def test_a_stale_session_is_refused_and_nothing_is_stored(
    service: DjangoSessionService, committed_db: CommittedDatabase
) -> None:
    stale = run(service.create_session(**NAMED))
    run(service.append_event(get(service), event("first")))
    before = counted(committed_db)
    with pytest.raises(StaleSessionError):
        run(service.append_event(stale, event("lost", actions=delta(user__u=1), usage_metadata=_usage())))
    assert counted(committed_db) == before
    assert stale.events == []
    assert texts(get(service)) == ["first"]


def test_a_session_of_an_older_life_of_its_id_is_refused(service: DjangoSessionService) -> None:
    old = run(service.create_session(**NAMED))
    run(service.delete_session(**NAMED))
    with pytest.raises(SessionNotFoundError):
        run(service.append_event(old, event()))
    run(service.create_session(**NAMED))
    with pytest.raises(StaleSessionError):
        run(service.append_event(old, event()))


def test_a_session_that_the_caller_built_is_refused_if_it_lacks_an_event(
    service: DjangoSessionService,
) -> None:
    run(service.create_session(**NAMED))
    run(service.append_event(get(service), event("first")))
    built = Session(id=SESSION, app_name=APP, user_id=USER)
    with pytest.raises(StaleSessionError):
        run(service.append_event(built, event("second")))
    complete = Session(**get(service).model_dump())
    complete.last_update_time = 0
    run(service.append_event(complete, event("second")))
    assert texts(get(service)) == ["first", "second"]


def test_a_session_is_created_once(service: DjangoSessionService) -> None:
    run(service.create_session(**NAMED))
    with pytest.raises(AlreadyExistsError):
        run(service.create_session(**NAMED, state={"user:u": 1}))
    assert run(service.get_user_state(app_name=APP, user_id=USER)) == {}
    assert run(service.create_session(app_name=APP, user_id=USER)).id != SESSION


def test_a_repeated_event_has_no_effect_and_another_one_with_its_id_is_refused(
    service: DjangoSessionService,
) -> None:
    session = run(service.create_session(**NAMED))
    first = event("first", actions=delta(n=1), usage_metadata=_usage())
    run(service.append_event(session, first.model_copy(deep=True)))
    stale = run(service.append_event(session, first.model_copy(deep=True)))
    assert stale == first
    assert (texts(session), texts(get(service))) == (["first"], ["first"])
    with pytest.raises(AlreadyExistsError):
        run(service.append_event(session, event("second", id=first.id)))


def _append_until_stored(db: CommittedDatabase, writer: int) -> int:
    async def append_all() -> int:
        service, refused = service_of(db), 0
        for number in range(5):
            new = event(
                f"{writer}/{number}", actions=delta(**{f"user__{writer}": number, f"n{writer}": number})
            )
            while True:
                session = await service.get_session(**NAMED)
                assert session is not None
                try:
                    await service.append_event(session, new.model_copy(deep=True))
                    break
                except StaleSessionError:
                    refused += 1
        return refused

    return run(append_all())


def test_threads_that_append_to_one_session_lose_and_double_nothing(
    service: DjangoSessionService, committed_db: CommittedDatabase
) -> None:
    run(service.create_session(**NAMED))
    outcomes = run_in_threads(_append_until_stored, [(committed_db, writer) for writer in range(6)])
    refused = sum(outcome.unwrap() for outcome in outcomes)
    session = get(service)
    assert sorted(texts(session)) == sorted(
        f"{writer}/{number}" for writer in range(6) for number in range(5)
    )
    assert session.state == {
        **{f"n{writer}": 4 for writer in range(6)},
        **{f"user:{writer}": 4 for writer in range(6)},
    }
    assert refused > 0


@pytest.mark.parametrize("threads", [None, 4])
def test_branches_of_one_run_append_to_one_session_object(
    service: DjangoSessionService, settings: Any, threads: int | None
) -> None:
    settings.HELIX_STORE = {**settings.HELIX_STORE, "ASYNC_THREADS": threads}

    async def branches() -> Session:
        session = await service.create_session(**NAMED)
        await asyncio.gather(*(service.append_event(session, event(str(number))) for number in range(12)))
        return session

    session = run(branches())
    assert sorted(texts(session)) == sorted(texts(get(service))) == sorted(map(str, range(12)))
    run(service.append_event(session, event("last")))


def test_a_superseded_owner_writes_nothing(
    service: DjangoSessionService, committed_db: CommittedDatabase
) -> None:
    session = run(service.create_session(**NAMED))
    stored_id = service.session_id_of(APP, USER, SESSION)
    locks = DatabaseLockManager(committed_db.alias, tenant=committed_db.tenant)
    first, second = locks.acquire(stored_id), locks.take_over(stored_id)
    assert first is not None
    superseded = service_of(committed_db, fencing_token=first.fencing_token)
    for write in (
        lambda: superseded.append_event(session, event()),
        lambda: superseded.delete_session(**NAMED),
        lambda: superseded.create_session(**NAMED),
    ):
        with pytest.raises(FencedOutError):
            run(write())
    owner = service_of(committed_db, fencing_token=second.fencing_token)
    run(owner.append_event(session, event("mine")))
    assert texts(get(service)) == ["mine"]


# --- Sessions of this store ------------------------------------------------------------------------


def _usage() -> types.GenerateContentResponseUsageMetadata:
    return types.GenerateContentResponseUsageMetadata(
        prompt_token_count=10,
        candidates_token_count=5,
        thoughts_token_count=2,
        cached_content_token_count=4,
        prompt_tokens_details=[
            types.ModalityTokenCount(modality=types.MediaModality.TEXT, token_count=7),
            types.ModalityTokenCount(modality=types.MediaModality.AUDIO, token_count=3),
        ],
        candidates_tokens_details=[
            types.ModalityTokenCount(modality=types.MediaModality.AUDIO, token_count=1)
        ],
    )


def _filled(db: CommittedDatabase) -> DjangoSessionService:
    service = service_of(db)
    for user in (USER, "grace"):
        session = run(
            service.create_session(**{**NAMED, "user_id": user}, state={"app:a": 1, "user:u": user})
        )
        run(service.append_event(session, event("How is Lisbon?")))
        answer = event("Sunny.", "guide", model_version="gemini-2.5-pro", usage_metadata=_usage())
        run(service.append_event(session, answer))
    return service


def test_usage_is_recorded_with_the_event(committed_db: CommittedDatabase) -> None:
    service = _filled(committed_db)
    usage = DatabaseUsageStore(committed_db.alias, tenant=committed_db.tenant)
    (entry,) = usage.get_entries(service.session_id_of(APP, USER, SESSION))
    assert (entry.model, entry.source.name) == ("gemini-2.5-pro", "guide")
    assert entry.tokens is not None
    assert entry.tokens == TokenCounts(
        prompt=10, completion=7, reasoning=2, cached=4, audio_prompt=3, audio_completion=1, total=17
    )
    silent = service_of(committed_db, model=None)
    run(silent.append_event(get(silent), event("again", usage_metadata=_usage())))
    assert len(usage.get_entries(service.session_id_of(APP, USER, SESSION))) == 1


def test_an_erasure_of_the_user_leaves_no_trace(committed_db: CommittedDatabase) -> None:
    service = _filled(committed_db)
    erase(using=committed_db.alias, tenant=committed_db.tenant, user_id=USER)
    assert run(service.get_session(**NAMED)) is None
    assert run(service.get_user_state(app_name=APP, user_id=USER)) == {}
    # What is left belongs to the other user and to the app.
    assert counted(committed_db) == {"session": 3, "item": 5, "usage": 1}
    assert USER not in str(lines_of(exported(committed_db)))
    assert get(service, user_id="grace").state == {"app:a": 1, "user:u": "grace"}


def test_an_idle_session_is_deleted_by_the_retention_policy(empty_db: CommittedDatabase) -> None:
    service = service_of(empty_db)

    def write() -> None:
        session = run(service.get_session(**NAMED)) or run(service.create_session(**NAMED))
        run(service.append_event(session, event()))

    assert_deleted_thirty_days_after_the_last_write(empty_db, write)


def test_a_deletion_keeps_the_state_of_the_app_and_the_user(committed_db: CommittedDatabase) -> None:
    service = _filled(committed_db)
    run(service.delete_session(**NAMED))
    run(service.delete_session(**NAMED))
    assert run(service.get_session(**NAMED)) is None
    assert run(service.create_session(**NAMED)).state == {"app:a": 1, "user:u": USER}
    assert counted(committed_db)["usage"] == 1


def test_an_import_of_an_export_is_the_same_file_again(
    sqlite_db: CommittedDatabase, postgres_db: CommittedDatabase
) -> None:
    other = replace(postgres_db, tenant=sqlite_db.tenant)
    service = _filled(sqlite_db)
    data = exported(sqlite_db)
    summary, file = imported(other, data)
    assert (summary.problems, file.problems) == ([], [])
    assert exported(other) == data
    copy = service_of(other)
    assert get(copy) == get(service)
    run(copy.append_event(get(copy), event("And tomorrow?")))
    assert texts(get(copy)) == ["How is Lisbon?", "Sunny.", "And tomorrow?"]


def test_a_branch_can_be_continued_under_an_id_of_its_own(committed_db: CommittedDatabase) -> None:
    service = _filled(committed_db)
    sessions = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    source, branch = (service.session_id_of(APP, USER, name) for name in (SESSION, "branch"))
    sessions.branch_session(source, new_session_id=branch)
    run(service.append_event(get(service, session_id="branch"), event("Elsewhere?")))
    assert texts(get(service, session_id="branch")) == ["How is Lisbon?", "Sunny.", "Elsewhere?"]
    assert texts(get(service)) == ["How is Lisbon?", "Sunny."]


def test_a_session_that_the_application_created_gets_items_and_loses_only_these(
    committed_db: CommittedDatabase,
) -> None:
    sessions = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    service = service_of(committed_db)
    stored_id = service.session_id_of(APP, USER, SESSION)
    sessions.create_session(stored_id, agent_type="guide", user_id=USER, title="Trip")
    assert run(service.get_session(**NAMED)) is None
    run(service.create_session(**NAMED))
    run(service.append_event(get(service), event()))
    run(service.delete_session(**NAMED))
    assert run(service.get_session(**NAMED)) is None
    stored = StoredSession.objects.using(committed_db.alias).get(tenant=committed_db.tenant)
    assert (stored.session_id, stored.title) == (stored_id, "Trip")


def test_an_event_that_cannot_be_read_is_an_integrity_fault(
    service: DjangoSessionService, committed_db: CommittedDatabase
) -> None:
    run(service.append_event(run(service.create_session(**NAMED)), event()))
    items = Item.objects.using(committed_db.alias).filter(
        session__tenant=committed_db.tenant, lane__contains="events"
    )
    items.update(payload='{"author":[1]}')
    with pytest.raises(IntegrityFault):
        get(service)
    newest = GetSessionConfig(num_recent_events=0)
    assert run(service.get_session(**NAMED, config=newest)) is not None
