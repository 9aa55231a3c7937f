"""Erasure: no byte is left in a dump, nothing else is touched, and the receipt counts every row."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.apps import apps
from django.contrib.auth.models import User
from django.db import transaction
from django.test import override_settings

from helix_store.cleanup import ErasureReceipt, erase
from helix_store.cleanup.erasure import Erasure, Forecast
from helix_store.cleanup.workspaces import digest_of
from helix_store.core.types import StepInfo, UsageKind
from helix_store.core.usage import UsageEntry, UsageSource
from helix_store.engine.database import Database
from helix_store.exceptions import InvalidQuery, SessionErased
from helix_store.models import Lock, Session, Stream, SubSessionRef, Tombstone
from helix_store.models import UsageEntry as UsageRow
from helix_store.stores import (
    DatabaseLockManager,
    DatabaseStateStore,
    DatabaseStreamManager,
    DatabaseUsageStore,
)
from helix_store.testing.state_store.samples import loaded
from tests.cells import for_each
from tests.cleanup.canaries import Canaries, canary, dumps, text_columns
from tests.cleanup.providers import MemoryProvider
from tests.databases import CommittedDatabase


@pytest.fixture
def store(empty_db: CommittedDatabase) -> DatabaseStateStore:
    return DatabaseStateStore(empty_db.alias, tenant=empty_db.tenant)


def rows(store: DatabaseStateStore, model: Any) -> Any:
    return model.objects.using(store.alias)


def counts(store: DatabaseStateStore) -> Counter[str]:
    # An erasure adds tombstones.
    models = set(apps.get_app_config("helix_store").get_models()) - {Tombstone}
    return Counter({str(model): rows(store, model).count() for model in models})


def found(alias: str, texts: Any) -> set[tuple[str, str]]:
    """The texts that a dump has, each with the way to read it."""
    return {(way, text) for way, dump in dumps(alias) for text in texts if text.encode() in dump}


# --- Canaries ---------------------------------------------------------------------------------------


@pytest.mark.thorough
@for_each("subject", ["user", "session", "tenant"])
def test_no_byte_is_left_in_a_dump(store: DatabaseStateStore, subject: str) -> None:
    alias, tenant = store.alias, canary() if subject == "tenant" else store.tenant
    erased, others = Canaries(alias, tenant), Canaries(alias, store.tenant)
    user = canary()
    session = erased.session(user_id=user, status="completed")
    erased.session(user_id=user, parent_session_id=session.session_id)
    branch = {"branched_from": session.session_id}
    erased.session(user_id=canary() if subject == "session" else user, metadata=branch)
    erased.row(UsageRow, session=None, recorded_for=session.session_id)
    if subject != "session":
        erased.row(UsageRow, session=None, user_id=user)
    if subject == "tenant":
        erased.row(Stream, floor=0, last_sequence=0)
        erased.row(Lock)
    scopes = {"user": ("user", user), "session": ("tree", session.session_id)}
    erased.budget(*scopes.get(subject, ("agent_type", canary())))
    other = others.session()
    others.budget("user", canary())
    if subject != "tenant":
        # What others hold of the session.
        erased.row(SubSessionRef, session=other, sub_session_id=session.session_id)
        entry = others.row(UsageRow, session=other, sub_session_id=session.session_id)
        del others.texts[session.session_id]
    missing = (
        text_columns()
        - {("Tombstone", "digest")}
        - erased.columns
        - {(name, "tenant") for name, _ in text_columns()}
    )
    assert missing == set()
    before = counts(store)
    texts = set(erased.texts) | ({tenant} if subject == "tenant" else set())
    ways = {way for way, _ in found(alias, [user])}
    assert ways
    assert found(alias, texts) == {(way, text) for way in ways for text in texts}

    provider = MemoryProvider({session.session_id: ["snapshot"]})
    by_subject = {"user": {"user_id": user}, "session": {"session_id": session.session_id}}
    arguments: Any = by_subject.get(subject, {"tenant": tenant})
    options: Any = {"using": alias, "workspace_providers": {"memory": provider}}
    said = erase(**arguments, **options, dry_run=True)
    assert counts(store) == before
    receipt = erase(**arguments, **options)

    assert found(alias, texts) == set()
    assert found(alias, others.texts) == {(way, text) for way in ways for text in others.texts}
    assert provider.deleted == ["snapshot"]
    assert receipt.complete
    assert sum(receipt.deleted.values()) == sum((before - counts(store)).values())
    assert said.deleted == receipt.deleted
    assert said.changed == receipt.changed
    if subject != "tenant":
        assert receipt.changed == {"usage_entry": 1}
        entry.refresh_from_db(using=alias)
        assert entry.sub_session_id is None
    text = json.dumps(receipt.to_dict())
    assert not [each for each in texts if each in text]
    assert ErasureReceipt.from_dict(json.loads(text)) == receipt
    assert erase(**arguments, **options).deleted == {}


# --- Whose rows -------------------------------------------------------------------------------------


def filled(store: DatabaseStateStore, session_id: str, user_id: str | None = "ada", **columns: Any) -> str:
    store.create_session(session_id, agent_type="agent", user_id=user_id, **columns)
    state = store.load_state(session_id)
    assert state is not None
    messages = [{"role": "user", "content": f"I am {user_id}"}]
    store.save_state_and_promote_staging(session_id, state, messages, StepInfo("step-1", 1))
    return session_id


def known(store: DatabaseStateStore) -> set[str]:
    return set(rows(store, Session).values_list("session_id", flat=True))


def spend(store: DatabaseStateStore, session_id: str, **columns: Any) -> None:
    DatabaseUsageStore(store.alias, tenant=store.tenant).record_entry(
        UsageEntry(
            session_id=session_id,
            kind=UsageKind.SUBAGENT,
            timestamp=1_700_000_000_000,
            source=UsageSource(type="agent", name="a"),
            step_count=1,
            agent_type="helper",
            success=True,
            duration_ms=1,
            **{"sub_session_id": "sub", **columns},
        )
    )


def test_a_user_is_erased_in_every_tenant_or_in_one(store: DatabaseStateStore) -> None:
    stores = [DatabaseStateStore(store.alias, tenant=tenant) for tenant in ("", "a", "b")]
    for each in stores:
        filled(each, "of-ada")
        filled(each, "of-bob", "bob")
    assert erase(using=store.alias, user_id="ada", tenant="a").trees == 1
    assert [each.session_exists("of-ada") for each in stores] == [True, False, True]
    assert erase(using=store.alias, user_id="ada").trees == 2
    assert known(store) == {"of-bob"}


def test_sub_sessions_go_with_their_tree_whoever_they_belong_to(store: DatabaseStateStore) -> None:
    filled(store, "top")
    filled(store, "child", None, parent_session_id="top")
    filled(store, "other", "bob")
    assert erase(using=store.alias, user_id="ada").deleted["session"] == 2
    assert known(store) == {"other"}


def test_the_parent_of_another_user_loses_its_ref_and_gets_a_new_version(store: DatabaseStateStore) -> None:
    filled(store, "of-bob", "bob")
    filled(store, "of-ada", parent_session_id="of-bob")
    refs = [{"sub_session_id": "of-ada", "agent_type": "agent", "status": "running"}]
    store.add_sub_session_refs("of-bob", refs)
    before = store.load_state("of-bob")
    assert before is not None
    assert erase(using=store.alias, user_id="ada").deleted["sub_session_ref"] == 1
    after = store.load_state("of-bob")
    assert after is not None
    assert after.version == before.version + 1
    assert store.get_sub_session_refs("of-bob") == []


def test_branches_of_others_go_too_because_they_copy_the_history(store: DatabaseStateStore) -> None:
    filled(store, "source")
    store.branch_session("source", new_session_id="branch")
    store.branch_session("branch", new_session_id="branch-of-branch")
    rows(store, Session).exclude(session_id="source").update(user_id="bob")
    filled(store, "other", "bob")
    receipt = erase(using=store.alias, user_id="ada")
    assert (receipt.trees, receipt.branches) == (3, 2)
    assert known(store) == {"other"}


def test_branches_that_are_kept_forget_their_source(store: DatabaseStateStore) -> None:
    filled(store, "source")
    store.branch_session("source", new_session_id="branch")
    options: Any = {"using": store.alias, "session_id": "source", "keep_branches": True}
    assert erase(**options, dry_run=True).changed == {"session": 1}
    receipt = erase(**options)
    assert (receipt.branches, receipt.changed) == (0, {"session": 1})
    state = store.load_state("branch")
    assert state is not None
    assert state.metadata == {}
    assert known(store) == {"branch"}


def test_a_branch_made_meanwhile_goes_too(store: DatabaseStateStore) -> None:
    filled(store, "source")

    class Interrupted(Erasure):
        def _erase_tree(self, db: Any, session_id: str, *args: Any, **kwargs: Any) -> None:
            if not store.session_exists("branch") and session_id == "source" and not self.receipt.trees:
                store.branch_session("source", new_session_id="branch")
            super()._erase_tree(db, session_id, *args, **kwargs)

    receipts = list(Interrupted(using=store.alias, session_id="source").batches())
    assert (receipts[-1].trees, receipts[-1].branches) == (2, 1)
    assert known(store) == set()


def test_usage_of_the_user_goes_wherever_it_is(store: DatabaseStateStore) -> None:
    filled(store, "deleted")
    spend(store, "deleted")
    store.delete_session("deleted", keep_usage=True)
    filled(store, "changed-hands")
    spend(store, "changed-hands")
    rows(store, Session).update(user_id="bob")
    spend(store, "changed-hands")
    assert erase(using=store.alias, user_id="ada").deleted == {"usage_entry": 2}
    assert rows(store, UsageRow).get().user_id == "bob"


def test_a_deleted_session_leaves_usage_and_a_lock_that_can_be_erased(store: DatabaseStateStore) -> None:
    lock = DatabaseLockManager(store.alias, tenant=store.tenant).acquire(filled(store, "gone"))
    assert lock is not None
    lock.release()
    spend(store, "gone")
    store.delete_session("gone", keep_usage=True)
    receipt = erase(using=store.alias, session_id="gone")
    assert receipt.deleted == {"lock": 1, "usage_entry": 1}
    assert receipt.complete


def test_a_deleted_sub_session_leaves_a_ref_with_its_output_that_can_be_erased(
    store: DatabaseStateStore,
) -> None:
    for tenant in (store.tenant, "other"):
        own = DatabaseStateStore(store.alias, tenant=tenant)
        own.create_session("parent", agent_type="agent")
        ref = {"sub_session_id": "child", "agent_type": "agent", "output": "secret"}
        own.add_sub_session_refs("parent", [ref, {**ref, "sub_session_id": "kept"}])
    store.create_session("child", agent_type="agent")
    store.delete_session("child")
    version = loaded(store, "parent").version
    receipt = erase(using=store.alias, session_id="child", tenant=store.tenant)
    assert (receipt.deleted, receipt.complete) == ({"sub_session_ref": 1}, True)
    assert [ref.sub_session_id for ref in store.get_sub_session_refs("parent")] == ["kept"]
    assert loaded(store, "parent").version == version + 1
    # The ref of the other tenant is the only trace of its sub-session.
    assert erase(using=store.alias, session_id="child").deleted == {"sub_session_ref": 1}
    assert rows(store, SubSessionRef).count() == 2


def test_a_session_id_of_several_tenants_needs_the_tenant(store: DatabaseStateStore) -> None:
    for tenant in ("a", "b"):
        filled(DatabaseStateStore(store.alias, tenant=tenant), "same")
    with pytest.raises(InvalidQuery, match="2 tenants"):
        erase(using=store.alias, session_id="same")
    assert erase(using=store.alias, session_id="same", tenant="a").trees == 1
    assert erase(using=store.alias, session_id="same").trees == 1


@pytest.mark.parametrize("arguments", [{}, {"user_id": "a", "session_id": "b"}])
def test_other_combinations_are_refused(arguments: Any) -> None:
    with pytest.raises(InvalidQuery):
        erase(**arguments)


def tenant_with_trees(store: DatabaseStateStore) -> None:
    """Sub-sessions before and after their owners, by the order of their keys."""
    for session_id, parent in (("sub-before", None), ("root", None), ("child", "root"), ("alone", None)):
        filled(store, session_id, parent_session_id=parent)
    ref = {"sub_session_id": "sub-before", "agent_type": "agent", "status": "running"}
    store.add_sub_session_refs("root", [ref])


def test_a_dry_run_of_a_tenant_counts_each_session_once(store: DatabaseStateStore) -> None:
    tenant_with_trees(store)
    said = erase(using=store.alias, tenant=store.tenant, dry_run=True)
    receipt = erase(using=store.alias, tenant=store.tenant)
    assert (said.trees, said.deleted, said.changed) == (receipt.trees, receipt.deleted, receipt.changed)
    assert (receipt.trees, receipt.deleted["session"]) == (3, 4)


@for_each("size", [1, 2, 3, 4])
def test_pages_of_a_tenant_count_each_session_once(store: DatabaseStateStore, size: int) -> None:
    tenant_with_trees(store)
    db = Database(store.alias, store.tenant)
    forecast = Forecast(force=False)
    keys = list(rows(store, Session).order_by("pk").values_list("pk", flat=True))
    pages = [forecast.of_page(db, keys[first : first + size]) for first in range(0, len(keys), size)]
    assert sum(page.trees for page in pages) == 3
    assert sum(page.deleted[Session] for page in pages) == 4


def test_a_dry_run_of_a_tenant_leaves_a_tree_with_a_session_in_use(store: DatabaseStateStore) -> None:
    tenant_with_trees(store)
    assert DatabaseLockManager(store.alias, tenant=store.tenant).acquire("sub-before")
    for dry_run in (True, False):
        receipt = erase(using=store.alias, tenant=store.tenant, dry_run=dry_run)
        # The sub-session in use and its owner stay; the other sub-session is free.
        assert (receipt.sessions_left, receipt.trees, receipt.deleted["session"]) == (2, 2, 2)


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_dry_run_is_rolled_back_also_if_it_is_stopped(store: DatabaseStateStore, is_stopped: bool) -> None:
    for number in range(3):
        filled(store, f"session-{number}")
    batches = Erasure(using=store.alias, user_id="ada", dry_run=True).batches()
    assert next(batches).trees == 1
    assert len(known(store)) == 2
    if is_stopped:
        batches.close()
    else:
        assert [batch.trees for batch in batches][-1] == 3
    assert len(known(store)) == 3


def test_a_dry_run_keeps_what_the_callers_transaction_wrote_before(store: DatabaseStateStore) -> None:
    with transaction.atomic(using=store.alias):
        filled(store, "session")
        assert erase(using=store.alias, user_id="ada", dry_run=True).trees == 1
    assert known(store) == {"session"}


def test_a_dry_run_counts_a_sub_session_of_two_trees_once(store: DatabaseStateStore) -> None:
    for session_id, parent in (("one", None), ("two", None), ("shared", "one")):
        filled(store, session_id, parent_session_id=parent)
    store.add_sub_session_refs(
        "two", [{"sub_session_id": "shared", "agent_type": "agent", "status": "running"}]
    )
    said = erase(using=store.alias, user_id="ada", dry_run=True)
    receipt = erase(using=store.alias, user_id="ada")
    assert (said.trees, said.deleted, said.changed) == (receipt.trees, receipt.deleted, receipt.changed)
    assert receipt.deleted["session"] == 3


# --- What is left ------------------------------------------------------------------------------------


def test_a_session_in_use_is_left_unless_forced(store: DatabaseStateStore) -> None:
    assert DatabaseLockManager(store.alias, tenant=store.tenant).acquire(filled(store, "locked"))
    filled(store, "free")
    erasure = Erasure(using=store.alias, user_id="ada")
    *_, receipt = erasure.batches()
    assert (receipt.sessions_left, receipt.trees, receipt.complete) == (1, 1, False)
    assert [(key.session_id, reason) for key, reason in erasure.left] == [("locked", "it is in use")]
    assert rows(store, Lock).count() == 1
    forced = erase(using=store.alias, user_id="ada", force=True)
    assert (forced.trees, forced.complete) == (1, True)
    assert rows(store, Lock).count() == 0


def test_the_source_of_a_branch_in_use_is_left_so_that_a_repeat_finds_the_branch(
    store: DatabaseStateStore,
) -> None:
    filled(store, "source")
    store.branch_session("source", new_session_id="branch")
    lock = DatabaseLockManager(store.alias, tenant=store.tenant).acquire("branch")
    assert lock is not None
    receipt = erase(using=store.alias, session_id="source")
    assert (receipt.sessions_left, receipt.trees) == (2, 0)
    lock.release()
    assert erase(using=store.alias, session_id="source").trees == 2


def test_a_lock_of_a_tenant_that_is_held_is_left(store: DatabaseStateStore) -> None:
    filled(store, "session")
    assert DatabaseLockManager(store.alias, tenant=store.tenant).acquire("nightly")
    receipt = erase(using=store.alias, tenant=store.tenant)
    assert (receipt.locks_left, receipt.trees, receipt.complete) == (1, 1, False)
    assert erase(using=store.alias, tenant=store.tenant, force=True).deleted == {"lock": 1}


def test_snapshots_without_a_provider_keep_the_session(store: DatabaseStateStore) -> None:
    filled(store, "work")
    state = store.load_state("work")
    assert state is not None
    state.workspace_refs = {"code": {"provider": "unknown"}}
    store.save_state("work", state)
    receipt = erase(using=store.alias, user_id="ada")
    assert (receipt.errors, receipt.trees, receipt.complete) == (1, 0, False)
    assert erase(using=store.alias, user_id="ada", leave_snapshots=True).complete


def test_an_erasure_that_was_stopped_is_completed_by_a_repeat(store: DatabaseStateStore) -> None:
    for number in range(3):
        filled(store, f"session-{number}")
    assert next(Erasure(using=store.alias, user_id="ada").batches()).trees == 1
    assert erase(using=store.alias, user_id="ada").trees == 2


def test_streams_go_with_their_session_and_shared_ones_stay(store: DatabaseStateStore) -> None:
    streams = DatabaseStreamManager(store.alias, tenant=store.tenant)

    async def write(stream_id: str) -> None:
        writer = await streams.create_writer(stream_id, "run-1", "agent")
        await writer.write({"type": "text", "text": "hello"})
        await writer.close()
        await streams.end_stream(stream_id)

    filled(store, "session")
    filled(store, "own-id", stream_id="elsewhere")
    for stream_id in ("session", "own-id", "shared", "other"):
        async_to_sync(write)(stream_id)
    filled(store, "one", stream_id="shared")
    filled(store, "two", "bob", stream_id="shared")
    receipt = erase(using=store.alias, user_id="ada")
    assert (receipt.deleted["stream"], receipt.deleted["stream_chunk"]) == (2, 2)
    assert set(rows(store, Stream).values_list("stream_id", flat=True)) == {"shared", "other"}


def test_the_receipt_has_a_digest_instead_of_the_id(store: DatabaseStateStore) -> None:
    filled(store, "session")
    with override_settings(HELIX_STORE={"PAGE_SIZE": 1}):
        receipt = erase(using=store.alias, user_id="ada", tenant=store.tenant)
    assert receipt.subject == "user"
    assert receipt.subject_sha256 == digest_of("ada")
    assert receipt.tenant_sha256 == digest_of(store.tenant)
    assert receipt.finished_at is not None
    assert receipt.started_at <= receipt.finished_at


def test_a_user_is_forgotten_as_the_author_of_posts(store: DatabaseStateStore) -> None:
    store.create_session("of-bob", agent_type="agent", user_id="bob")
    message = {"role": "user", "content": "hello"}
    store.post_message("of-bob", message, author="ada")
    store.receive_posts("of-bob")
    waiting = store.post_message("of-bob", message, author="ada")
    other = store.post_message("of-bob", message, author="bob")
    erase_ada = partial(erase, using=store.alias, user_id="ada")
    assert erase_ada(dry_run=True).changed == erase_ada().changed == {"post": 2}
    posts = store.list_posts("of-bob", states=("waiting", "received", "withdrawn")).items
    assert [(post.author, post.state) for post in posts] == [
        (None, "received"),
        (None, "withdrawn"),
        ("bob", "waiting"),
    ]
    assert posts[1].post_id == waiting.post_id
    assert store.receive_posts("of-bob") == [other.message]


def test_a_django_user_is_forgotten_as_the_author_of_posts(store: DatabaseStateStore) -> None:
    store.create_session("of-bob", agent_type="agent", user_id="bob")
    for key in (7, 77):
        message = {"role": "user", "content": f"from {key}"}
        store.post_message("of-bob", message, author=User(pk=key, username=f"user {key}"))
    assert erase(using=store.alias, user_id="7").changed == {"post": 1}
    posts = store.list_posts("of-bob", states=("waiting", "withdrawn")).items
    assert [(post.author, post.state) for post in posts] == [(None, "withdrawn"), ("user:77", "waiting")]


def test_no_writer_brings_back_the_stream_of_an_erased_session(store: DatabaseStateStore) -> None:
    streams = DatabaseStreamManager(store.alias, tenant=store.tenant)

    def write(stream_id: str) -> None:
        writer = async_to_sync(streams.create_writer)(stream_id, "run", "agent")
        async_to_sync(writer.write)({"type": "text", "text": "Dear Ada"})

    store.create_session("adas", agent_type="agent", user_id="ada", stream_id="shared")
    write("adas")
    assert erase(using=store.alias, tenant=store.tenant, user_id="ada").complete
    with pytest.raises(SessionErased):
        write("adas")
    assert not Stream.objects.using(store.alias).filter(tenant=store.tenant).exists()
    # Other sessions may use this stream.
    write("shared")
    store.create_session("adas", agent_type="agent")
    write("adas")
    write("adas")
    assert Stream.objects.using(store.alias).get(tenant=store.tenant, stream_id="adas").last_sequence == 2
