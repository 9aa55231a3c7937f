"""The workspace snapshots that a session owns, from the providers of its workspace refs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from helix_store.cleanup.backend import SessionKey
from helix_store.cleanup.workspaces import WorkspaceProvider, listed_snapshots

__all__ = ["MissingProvider", "Snapshot", "owned_snapshots"]


class MissingProvider(Exception):
    """Raised if a session has a workspace of a provider that is not configured."""

    def __init__(self, name: object) -> None:
        super().__init__(name)
        self.provider = f"{name!r:.100}"


class Snapshot(NamedTuple):
    provider: WorkspaceProvider
    snapshot_id: str

    def delete(self) -> None:
        self.provider.delete_snapshot(self.snapshot_id)


def owned_snapshots(
    providers: Mapping[str, WorkspaceProvider], key: SessionKey, refs: Iterable[Any]
) -> list[Snapshot]:
    """Return the snapshots of a session. Raise `MissingProvider` before listing any of them."""
    known = [(_provider(providers, ref), ref) for ref in refs]
    return [
        Snapshot(provider, snapshot_id)
        for provider, ref in known
        for snapshot_id in listed_snapshots(provider, key.session_id, ref, tenant=key.tenant)
    ]


def _provider(providers: Mapping[str, WorkspaceProvider], ref: Any) -> WorkspaceProvider:
    name = ref.get("provider") if isinstance(ref, Mapping) else None
    provider = providers.get(name) if isinstance(name, str) else None
    if provider is None:
        raise MissingProvider(name)
    return provider
