"""A folder belongs to one session of one tenant, whatever ids, tenants and paths are made of."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from django.core.files.base import ContentFile
from django.core.files.storage import FileSystemStorage, InMemoryStorage, Storage
from django.test import override_settings
from hypothesis import given
from hypothesis import strategies as st

from helix_store.cleanup import CleanupSummary, expired_session_cleanup
from helix_store.core.contracts import StateStore
from helix_store.engine.memory import MemoryWorld
from helix_store.exceptions import InvalidPayload
from helix_store.stores import DatabaseStateStore, InMemoryStateStore
from helix_store.workspaces import StorageWorkspaceProvider
from tests.cells import for_each
from tests.cleanup.conftest import LONG_AGO
from tests.databases import CommittedDatabase

REF = {"provider": "disk"}


@pytest.fixture(params=["folder", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return FileSystemStorage(tmp_path / "snapshots") if request.param == "folder" else InMemoryStorage()


def expire(store: StateStore, session_id: str, **ref: Any) -> None:
    state = store.create_session(session_id, agent_type="agent", expires_at=LONG_AGO)
    state.workspace_refs = {"main": {**REF, **ref}}
    store.save_state(session_id, state)


def cleanup(provider: Any, **options: Any) -> CleanupSummary:
    return expired_session_cleanup(workspace_providers={"disk": provider}, **options)


def test_tenants_with_the_same_session_id_have_folders_of_their_own(
    empty_db: CommittedDatabase, storage: Storage
) -> None:
    provider = StorageWorkspaceProvider(storage)
    tenants = ("", "a", "b")
    for tenant in tenants:
        store = DatabaseStateStore(empty_db.alias, tenant=tenant)
        if tenant == "b":
            store.create_session("session", agent_type="agent")
        else:
            expire(store, "session")
        folder = provider.folder("session", tenant=tenant)
        assert storage.save(f"{folder}/snapshot.tar", ContentFile(b"x")) == f"{folder}/snapshot.tar"
    summary = cleanup(provider, using=empty_db.alias)
    assert summary == CleanupSummary(detected=2, marked=2, snapshots_deleted=2)
    left = [storage.exists(f"{provider.folder('session', tenant=each)}/snapshot.tar") for each in tenants]
    assert left == [False, False, True]


def test_tenants_in_memory_have_folders_of_their_own(storage: Storage) -> None:
    provider = StorageWorkspaceProvider(storage)
    world = MemoryWorld()
    for tenant in ("a", "b"):
        expire(InMemoryStateStore(tenant=tenant, world=world), "session")
        storage.save(f"{provider.folder('session', tenant=tenant)}/snapshot.tar", ContentFile(b"x"))
    assert cleanup(provider, state_store=InMemoryStateStore(tenant="a", world=world)).snapshots_deleted == 1
    assert storage.exists(f"{provider.folder('session', tenant='b')}/snapshot.tar")


@for_each("path", ["uploads", "victim", "uploads/inner", "tenant=a/victim"])
def test_the_path_of_a_ref_reaches_neither_other_sessions_nor_other_files(
    committed_db: CommittedDatabase, storage: Storage, path: str
) -> None:
    provider = StorageWorkspaceProvider(storage)
    kept = ["uploads/precious.txt", "uploads/inner/precious.txt", "victim/a.tar", "tenant=a/victim/a.tar"]
    for name in kept:
        storage.save(name, ContentFile(b"x"))
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    expire(store, "session", path=path)
    ref = {**REF, "path": path}
    own = storage.save(f"{provider.folder('session', ref, tenant=store.tenant)}/own.tar", ContentFile(b"x"))
    assert cleanup(provider, state_store=store) == CleanupSummary(detected=1, marked=1, snapshots_deleted=1)
    assert [name for name in kept if not storage.exists(name)] == []
    assert not storage.exists(own)


@for_each("long_id", ["a" * 255, "ł" * 255, "a/b" * 80])
def test_no_session_id_is_the_shortened_name_of_a_longer_one(storage: Storage, long_id: str) -> None:
    provider = StorageWorkspaceProvider(storage)
    folder = provider.folder(long_id)
    storage.save(f"{folder}/victim.tar", ContentFile(b"x"))
    assert len(folder) == 200
    assert folder.endswith(hashlib.sha256(long_id.encode()).hexdigest())
    assert list(provider.list_snapshots(folder, REF)) == []
    assert provider.folder(folder) != folder
    assert provider.folder(provider.folder(folder)) not in (folder, provider.folder(folder))


def test_the_default_storage_keeps_what_the_project_uploaded(tmp_path: Path) -> None:
    (tmp_path / "avatars").mkdir()
    (tmp_path / "avatars" / "face.png").write_text("x")
    with override_settings(MEDIA_ROOT=tmp_path):
        provider = StorageWorkspaceProvider()
        assert list(provider.list_snapshots("avatars", REF)) == []
        name = provider.storage.save(f"{provider.folder('avatars')}/a.tar", ContentFile(b"x"))
        assert list(provider.list_snapshots("avatars", REF)) == [name]


@for_each(
    "path",
    ["", ".", "/", "/etc", "..", "../other", "a/../..", "a/./b", "a//b", "a\\..\\b", "a\x00", 7, ["a"]],
    ids=repr,
)
def test_a_path_that_could_lead_upwards_is_refused(storage: Storage, path: Any) -> None:
    provider = StorageWorkspaceProvider(storage)
    storage.save("a/kept.tar", ContentFile(b"x"))
    with pytest.raises(InvalidPayload):
        list(provider.list_snapshots("session", {**REF, "path": path}))


@for_each("session_id", ["", "a" * 256, "a\x00", "a\n", "\ud800", 7], ids=repr)
def test_an_id_that_is_no_session_id_has_no_folder(storage: Storage, session_id: Any) -> None:
    """The name of an empty id would be that of the root, where every session has its folder."""
    provider = StorageWorkspaceProvider(storage)
    with pytest.raises(InvalidPayload):
        provider.folder(session_id)
    with pytest.raises(InvalidPayload):
        provider.folder("session", tenant=session_id or "\x00")


class ObjectStorage(InMemoryStorage):
    """Lists names as an object store does, whose keys may have any parts."""

    listed = 0

    def listdir(self, path: str) -> tuple[list[str], list[str]]:
        self.listed += 1
        folders, files = super().listdir(path)
        return ([*folders, ".."] if path == "session" else folders), files


def test_a_listed_name_that_leads_upwards_is_refused() -> None:
    storage = ObjectStorage()
    for name in ("session/a.tar", "victim/a.tar"):
        storage.save(name, ContentFile(b"x"))
    with pytest.raises(InvalidPayload):
        list(StorageWorkspaceProvider(storage).list_snapshots("session", REF))
    assert storage.listed == 1


class TenantlessProvider:
    """A provider of a project that was written before tenants were handed over."""

    def __init__(self) -> None:
        self.listed: list[str] = []

    def list_snapshots(self, session_id: str, ref: Mapping[str, Any]) -> Iterable[str]:
        self.listed.append(session_id)
        return []

    def delete_snapshot(self, snapshot_id: str) -> None:
        raise AssertionError("it lists nothing")


class ForwardingProvider(TenantlessProvider):
    """Hands whatever it is given to another provider."""

    def list_snapshots(self, *arguments: Any, **options: Any) -> Iterable[str]:
        self.listed.append(options["tenant"])
        return []


@pytest.mark.parametrize("kind", [TenantlessProvider, ForwardingProvider])
def test_a_provider_gets_the_tenant_if_it_takes_one(
    committed_db: CommittedDatabase, kind: type[TenantlessProvider]
) -> None:
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    expire(store, "session")
    provider = kind()
    assert cleanup(provider, state_store=store) == CleanupSummary(detected=1, marked=1)
    assert provider.listed == ["session" if kind is TenantlessProvider else committed_db.tenant]


PIECES = st.sampled_from(
    [
        "a",
        "A",
        "b",
        ".",
        "..",
        "/",
        "\\",
        "%",
        "%2F",
        "%2E",
        "-",
        "=",
        "tenant=",
        "~",
        " ",
        "ł",
        "🙂",
        "a" * 64,
        "f" * 64,
    ]
)
"""What names are built from, so that two texts meet more often than by chance."""

IDS = st.lists(PIECES, min_size=1, max_size=5).map("".join).filter(lambda text: len(text) <= 255)
TENANTS = st.one_of(st.just(""), IDS)
OWNERS = st.tuples(TENANTS, IDS)
PATHS = st.one_of(st.none(), st.lists(PIECES, min_size=1, max_size=3).map("".join))


@given(owners=st.lists(OWNERS, min_size=2, max_size=8, unique=True), data=st.data())
def test_no_two_sessions_meet_in_a_folder(owners: list[tuple[str, str]], data: st.DataObject) -> None:
    """Neither is the folder of one that of another, nor is it inside of it; nor is a shortened name an id."""
    provider = StorageWorkspaceProvider(InMemoryStorage())
    shortened = [("", provider.folder(session_id).split("/")[0]) for _, session_id in owners]
    everyone = sorted({*owners, *((tenant, name) for tenant, name in shortened if len(name) == 200)})
    folders = [provider.folder(session_id, tenant=tenant) for tenant, session_id in everyone]
    for one, other in itertools.permutations(folders, 2):
        assert not f"{one}/".startswith(f"{other}/")
    for (tenant, session_id), folder in zip(everyone, folders, strict=True):
        path = data.draw(PATHS)
        try:
            inner = provider.folder(session_id, {"path": path}, tenant=tenant)
        except InvalidPayload:
            continue
        assert f"{inner}/".startswith(f"{folder}/")
        assert ".." not in inner.split("/")
        assert max(len(name.encode()) for name in folder.split("/")) <= 255


@given(text=st.text(min_size=1, max_size=255), path=st.text(max_size=20))
def test_no_text_makes_a_folder_outside_of_its_root(text: str, path: str) -> None:
    provider = StorageWorkspaceProvider(InMemoryStorage())
    for tenant, ref in itertools.product(("", text), ({}, {"path": path})):
        try:
            folder = provider.folder(text, ref, tenant=tenant)
        except InvalidPayload:
            continue
        parts = folder.split("/")
        assert all(part not in ("", ".", "..") for part in parts)
        assert len(parts) >= (2 if tenant else 1)
