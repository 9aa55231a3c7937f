"""Snapshots in a Django storage: each session has its own folder, whatever its id is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.files.base import ContentFile
from django.core.files.storage import FileSystemStorage, InMemoryStorage, Storage
from django.test import override_settings

from helix_store.cleanup import CleanupSummary, expired_session_cleanup
from helix_store.exceptions import InvalidPayload
from helix_store.stores import InMemoryStateStore
from helix_store.workspaces import (
    StorageWorkspaceProvider,
    WorkspaceProvider,
    configured_workspace_providers,
)
from tests.cells import for_each
from tests.cleanup.conftest import LONG_AGO

HOSTILE_IDS = [
    "..",
    ".",
    "...",
    "../other",
    "/etc/passwd",
    "a/b",
    "a\\b",
    "~",
    "%2E%2E",
    "ł" * 255,
    "🙂",
    "a b",
]


@pytest.fixture(params=["folder", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return FileSystemStorage(tmp_path / "snapshots") if request.param == "folder" else InMemoryStorage()


def saved(provider: StorageWorkspaceProvider, session_id: str, name: str, ref: Any = None) -> str:
    return provider.storage.save(f"{provider.folder(session_id, ref)}/{name}", ContentFile(b"x"))


def test_it_is_a_workspace_provider(storage: Storage) -> None:
    assert isinstance(StorageWorkspaceProvider(storage), WorkspaceProvider)


def test_an_ordinary_session_keeps_its_snapshots_in_a_folder_of_its_name(storage: Storage) -> None:
    provider = StorageWorkspaceProvider(storage)
    storage.save("session-1/a.tar", ContentFile(b"x"))
    storage.save("session-1/inner/b.tar", ContentFile(b"x"))
    storage.save("session-10/c.tar", ContentFile(b"x"))
    ref = {"provider": "disk"}
    assert sorted(provider.list_snapshots("session-1", ref)) == ["session-1/a.tar", "session-1/inner/b.tar"]
    provider.delete_snapshot("session-1/a.tar")
    provider.delete_snapshot("session-1/a.tar")
    assert list(provider.list_snapshots("session-1", ref)) == ["session-1/inner/b.tar"]
    assert list(provider.list_snapshots("nobody", ref)) == []
    assert storage.exists("session-10/c.tar")


def test_no_session_reaches_the_snapshots_of_another_one(storage: Storage) -> None:
    provider = StorageWorkspaceProvider(storage)
    snapshots = {session_id: saved(provider, session_id, "a.tar") for session_id in HOSTILE_IDS}
    assert len(set(snapshots.values())) == len(HOSTILE_IDS)
    for session_id, snapshot_id in snapshots.items():
        assert list(provider.list_snapshots(session_id, {})) == [snapshot_id]


def test_a_ref_may_name_a_folder_of_its_session(storage: Storage) -> None:
    provider = StorageWorkspaceProvider(storage)
    ref = {"provider": "disk", "path": "work/first/"}
    snapshot_id = saved(provider, "session-1", "a.tar", ref)
    assert snapshot_id == "session-1/work/first/a.tar"
    assert list(provider.list_snapshots("session-1", ref)) == [snapshot_id]
    assert list(provider.list_snapshots("session-1", {**ref, "path": "work/second"})) == []
    assert list(provider.list_snapshots("session-1", {})) == [snapshot_id]


@for_each(
    "path", ["", ".", "./", "/", "/etc", "..", "../other", "a/../..", "a\\..\\b", "a\x00", 7, ["a"]], ids=repr
)
def test_a_ref_never_names_the_root_or_what_is_outside(storage: Storage, path: Any) -> None:
    provider = StorageWorkspaceProvider(storage)
    storage.save("a/kept.tar", ContentFile(b"x"))
    with pytest.raises(InvalidPayload):
        list(provider.list_snapshots("session-1", {"provider": "disk", "path": path}))


def test_a_cleanup_deletes_the_files_of_expired_sessions_alone(storage: Storage) -> None:
    store = InMemoryStateStore()
    provider = StorageWorkspaceProvider(storage)
    for name, expires_at in (("expired", LONG_AGO), ("live", None)):
        state = store.create_session(name, agent_type="agent", expires_at=expires_at)
        state.workspace_refs = {"main": {"provider": "disk"}}
        store.save_state(name, state)
        saved(provider, name, "a.tar")
    summary = expired_session_cleanup(state_store=store, workspace_providers={"disk": provider})
    assert summary == CleanupSummary(detected=1, marked=1, snapshots_deleted=1)
    assert not storage.exists("expired/a.tar")
    assert storage.exists("live/a.tar")


def test_the_settings_may_name_a_class_a_function_or_an_object() -> None:
    here = "tests.cleanup.test_workspaces"
    named = {
        "class": "helix_store.workspaces.StorageWorkspaceProvider",
        "function": f"{here}.make_provider",
        "object": f"{here}.PROVIDER",
    }
    with override_settings(HELIX_STORE={"WORKSPACE_PROVIDERS": named}):
        providers = configured_workspace_providers()
    assert providers["object"] is PROVIDER
    assert [type(provider) for provider in providers.values()] == [StorageWorkspaceProvider] * 3


@for_each("path", ["nobody.there", "nonsense", "datetime.datetime", "datetime.UTC", "os.getcwd"])
def test_a_setting_that_names_no_provider_is_refused(path: str) -> None:
    with (
        override_settings(HELIX_STORE={"WORKSPACE_PROVIDERS": {"disk": path}}),
        pytest.raises(ImproperlyConfigured),
    ):
        configured_workspace_providers()


PROVIDER = StorageWorkspaceProvider(InMemoryStorage())


def make_provider() -> StorageWorkspaceProvider:
    return StorageWorkspaceProvider(InMemoryStorage())
