"""Agents write the folders that a cleanup deletes, links included: nothing outside of them is touched."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import SuspiciousFileOperation
from django.core.files.base import ContentFile
from django.core.files.storage import FileSystemStorage, InMemoryStorage, Storage

from helix_store.cleanup import CleanupSummary, expired_session_cleanup
from helix_store.exceptions import InvalidPayload, LimitExceeded
from helix_store.stores import DatabaseStateStore
from helix_store.workspaces import StorageWorkspaceProvider
from tests.cells import for_each
from tests.cleanup.conftest import LONG_AGO
from tests.databases import CommittedDatabase

REF = {"provider": "disk"}


@pytest.fixture(params=["by descriptor", "by path"])
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of the storage, on a system that opens files relative to a folder and on one that does not."""
    if request.param == "by path":
        monkeypatch.setattr(os, "supports_dir_fd", set())
    folder = tmp_path / "storage"
    folder.mkdir()
    return folder


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder beside the root, with files that must stay."""
    folder = tmp_path / "outside"
    (folder / "inner").mkdir(parents=True)
    (folder / "passwords").write_text("secret")
    (folder / "inner" / "deeper").write_text("secret")
    return folder


@pytest.fixture
def provider(root: Path) -> StorageWorkspaceProvider:
    return StorageWorkspaceProvider(FileSystemStorage(root))


@pytest.fixture
def expired(root: Path, committed_db: CommittedDatabase) -> Callable[..., Path]:
    """Create an expired session with one snapshot, and return its folder."""
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)

    def create(session_id: str, **ref: Any) -> Path:
        state = store.create_session(session_id, agent_type="agent", expires_at=LONG_AGO)
        state.workspace_refs = {"main": {**REF, **ref}}
        store.save_state(session_id, state)
        provider = StorageWorkspaceProvider(FileSystemStorage(root))
        folder = root / provider.folder(session_id, tenant=committed_db.tenant)
        folder.mkdir(parents=True)
        (folder / "own.tar").write_text("x")
        return folder

    return create


@pytest.fixture
def cleanup(provider: StorageWorkspaceProvider, committed_db: CommittedDatabase) -> Callable[[], Any]:
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)

    def clean_up(provider: StorageWorkspaceProvider = provider) -> CleanupSummary:
        return expired_session_cleanup(state_store=store, workspace_providers={"disk": provider})

    return clean_up


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_link_to_a_folder_outside_is_removed_and_the_folder_stays(
    expired: Callable[..., Path], cleanup: Callable[[], CleanupSummary], outside: Path
) -> None:
    folder = expired("session")
    (folder / "link").symlink_to(outside, target_is_directory=True)
    (folder / "relative").symlink_to("../" * 8 + str(outside).lstrip("/"), target_is_directory=True)
    assert cleanup() == CleanupSummary(detected=1, marked=1, snapshots_deleted=3)
    assert files(outside) == ["deeper", "passwords"]
    assert list(folder.iterdir()) == []


def test_a_link_to_a_file_outside_is_removed_and_the_file_stays(
    expired: Callable[..., Path], cleanup: Callable[[], CleanupSummary], outside: Path
) -> None:
    folder = expired("session")
    (folder / "link").symlink_to(outside / "passwords")
    (folder / "dangling").symlink_to(outside / "nothing")
    assert cleanup() == CleanupSummary(detected=1, marked=1, snapshots_deleted=3)
    assert files(outside) == ["deeper", "passwords"]
    assert list(folder.iterdir()) == []


def test_a_link_to_another_session_leaves_its_snapshots(
    provider: StorageWorkspaceProvider, root: Path
) -> None:
    (root / "victim").mkdir()
    (root / "victim" / "kept.tar").write_text("x")
    (root / "session").mkdir()
    (root / "session" / "link").symlink_to(root / "victim", target_is_directory=True)
    assert list(provider.list_snapshots("session", REF)) == ["session/link"]
    provider.delete_snapshot("session/link")
    assert files(root) == ["kept.tar"]


def test_a_link_to_itself_does_not_keep_the_session(
    expired: Callable[..., Path], cleanup: Callable[[], CleanupSummary]
) -> None:
    folder = expired("session")
    (folder / "loop").symlink_to("loop")
    assert cleanup() == CleanupSummary(detected=1, marked=1, snapshots_deleted=2)
    assert list(folder.iterdir()) == []
    assert cleanup() == CleanupSummary()


def test_links_to_their_own_folder_are_walked_once(provider: StorageWorkspaceProvider, root: Path) -> None:
    """Two of them have 2^40 paths before the system refuses one."""
    (root / "session" / "inner").mkdir(parents=True)
    (root / "session" / "own.tar").write_text("x")
    for name in ("a", "b"):
        (root / "session" / name).symlink_to(".", target_is_directory=True)
        (root / "session" / "inner" / name).symlink_to("..", target_is_directory=True)
    names = list(islice(provider.list_snapshots("session", REF), 1_000))
    assert sorted(names) == [f"session/{name}" for name in ("a", "b", "inner/a", "inner/b", "own.tar")]


def test_two_folders_that_link_to_each_other_end(
    expired: Callable[..., Path], cleanup: Callable[[], CleanupSummary]
) -> None:
    folder = expired("session")
    for name, other in (("a", "b"), ("b", "a")):
        (folder / name).mkdir()
        for number in range(2):
            (folder / name / f"link-{number}").symlink_to(f"../{other}", target_is_directory=True)
    assert cleanup() == CleanupSummary(detected=1, marked=1, snapshots_deleted=5)


def test_a_session_folder_that_is_a_link_is_removed_as_a_link(
    expired: Callable[..., Path], cleanup: Callable[[], CleanupSummary], outside: Path
) -> None:
    folder = expired("session")
    (folder / "own.tar").unlink()
    folder.rmdir()
    folder.symlink_to(outside, target_is_directory=True)
    assert cleanup() == CleanupSummary(detected=1, marked=1, snapshots_deleted=1)
    assert not folder.is_symlink()
    assert files(outside) == ["deeper", "passwords"]


@for_each("path", ["work", "work/inner", "work/inner/more"])
def test_a_ref_through_a_link_removes_the_link(
    expired: Callable[..., Path], cleanup: Callable[[], CleanupSummary], outside: Path, path: str
) -> None:
    folder = expired("session", path=path)
    (folder / "work").symlink_to(outside, target_is_directory=True)
    assert cleanup() == CleanupSummary(detected=1, marked=1, snapshots_deleted=1)
    assert files(outside) == ["deeper", "passwords"]
    assert files(folder) == ["own.tar"]
    assert not (folder / "work").is_symlink()


def test_a_file_in_the_place_of_a_folder_does_not_keep_the_session(
    expired: Callable[..., Path], cleanup: Callable[[], CleanupSummary]
) -> None:
    folder = expired("session", path="work/inner")
    (folder / "work").write_text("no folder")
    assert cleanup() == CleanupSummary(detected=1, marked=1, snapshots_deleted=1)
    assert files(folder) == ["own.tar"]


def test_a_link_above_the_session_is_refused(
    provider: StorageWorkspaceProvider, root: Path, outside: Path
) -> None:
    folder = Path(provider.folder("inner", tenant="acme"))
    (root / folder.parent).symlink_to(outside, target_is_directory=True)
    with pytest.raises(SuspiciousFileOperation):
        list(provider.list_snapshots("inner", REF, tenant="acme"))
    with pytest.raises(SuspiciousFileOperation):
        provider.delete_snapshot(f"{folder}/deeper")
    assert files(outside) == ["deeper", "passwords"]


def test_a_folder_that_becomes_a_link_after_it_was_listed_is_refused(
    provider: StorageWorkspaceProvider, root: Path, outside: Path
) -> None:
    folder = root / "session" / "work" / "inner"
    folder.mkdir(parents=True)
    (folder / "deeper").write_text("x")
    (snapshot_id,) = provider.list_snapshots("session", REF)
    folder.parent.rename(root / "moved")
    folder.parent.symlink_to(outside, target_is_directory=True)
    with pytest.raises(SuspiciousFileOperation):
        provider.delete_snapshot(snapshot_id)
    assert files(outside) == ["deeper", "passwords"]
    (snapshot_id,) = provider.list_snapshots("session", REF)
    provider.delete_snapshot(snapshot_id)
    assert not folder.parent.is_symlink()


def test_the_root_may_be_a_link(root: Path, tmp_path: Path) -> None:
    (root / "session").mkdir()
    (root / "session" / "own.tar").write_text("x")
    (tmp_path / "media").symlink_to(root, target_is_directory=True)
    provider = StorageWorkspaceProvider(FileSystemStorage(tmp_path / "media"))
    (snapshot_id,) = provider.list_snapshots("session", REF)
    provider.delete_snapshot(snapshot_id)
    assert files(root) == []


@for_each(
    "snapshot_id",
    [
        "",
        ".",
        "..",
        "/",
        "../outside/passwords",
        "a/../../outside/passwords",
        "a//b",
        "a\x00b",
        "/etc/passwd",
    ],
)
def test_a_snapshot_id_names_nothing_outside_the_root(
    provider: StorageWorkspaceProvider, outside: Path, snapshot_id: str
) -> None:
    for storage in (provider.storage, InMemoryStorage()):
        with pytest.raises(InvalidPayload):
            StorageWorkspaceProvider(storage).delete_snapshot(snapshot_id)
    assert files(outside) == ["deeper", "passwords"]


@pytest.fixture(params=["folder", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return FileSystemStorage(tmp_path / "snapshots") if request.param == "folder" else InMemoryStorage()


def test_a_walk_is_bounded_in_depth_and_in_entries(storage: Storage) -> None:
    provider = StorageWorkspaceProvider(storage, max_depth=3, max_entries=10)
    storage.save("deep/1/2/3/a.tar", ContentFile(b"x"))
    storage.save("deeper/1/2/3/4/a.tar", ContentFile(b"x"))
    for number in range(11):
        storage.save(f"many/{number % 10}.tar" if number < 10 else "more/10.tar", ContentFile(b"x"))
        storage.save(f"more/{number}.tar", ContentFile(b"x"))
    assert len(list(provider.list_snapshots("deep", REF))) == 1
    assert len(list(provider.list_snapshots("many", REF))) == 10
    for session_id, limit in (("deeper", 3), ("more", 10)):
        with pytest.raises(LimitExceeded) as caught:
            list(provider.list_snapshots(session_id, REF))
        assert (caught.value.limit, caught.value.actual) == (limit, limit + 1)


def test_a_walk_beyond_its_bounds_leaves_the_folder_and_lets_the_session_expire(
    expired: Callable[..., Path],
    cleanup: Callable[[StorageWorkspaceProvider], CleanupSummary],
    provider: StorageWorkspaceProvider,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = expired("hostile")
    (folder / "/".join("d" * 9)).mkdir(parents=True)
    expired("ordinary")
    summary = cleanup(StorageWorkspaceProvider(provider.storage, max_depth=8))
    assert summary == CleanupSummary(detected=2, marked=2, errors=1, snapshots_deleted=1)
    assert files(folder) == ["own.tar"]
    assert "'hostile' has expired, but its workspaces remain: max_depth" in caplog.text
    # It is over: no later cleanup meets it again.
    assert cleanup(StorageWorkspaceProvider(provider.storage, max_depth=8)) == CleanupSummary()
