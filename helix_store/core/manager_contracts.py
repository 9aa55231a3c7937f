"""Protocols of a lock manager and a stream manager, and of the objects that they return."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from datetime import datetime, timedelta
from typing import Any, Protocol

from helix_store.core.streams import PrunedStreams, StoredChunk, StreamInfo
from helix_store.core.types import Duration, LockInfo, StreamStatus

__all__ = ["ChunkReader", "ChunkWriter", "HeldLock", "LockManager", "StreamManager"]


class HeldLock(AbstractContextManager["HeldLock"], AbstractAsyncContextManager["HeldLock"], Protocol):
    """One term of a lock. It is a synchronous and asynchronous context manager that releases the lock."""

    @property
    def name(self) -> str: ...

    @property
    def owner(self) -> str: ...

    @property
    def fencing_token(self) -> int: ...

    @property
    def expires_at(self) -> datetime: ...

    def is_trusted(self) -> bool: ...

    def refresh(self, ttl_ms: Duration | None = None) -> datetime: ...

    def release(self) -> bool: ...

    async def arefresh(self, ttl_ms: Duration | None = None) -> datetime: ...

    async def arelease(self) -> bool: ...

    def keep_alive(self) -> AbstractContextManager[object]: ...


class LockManager(Protocol):
    """Leases with fencing tokens, as `helix_store.testing.LockManagerContract` tests them."""

    def acquire(
        self, name: str, *, ttl_ms: Duration | None = None, owner: str | None = None
    ) -> HeldLock | None: ...

    def wait_acquire(
        self, name: str, *, timeout_ms: Duration, ttl_ms: Duration | None = None, owner: str | None = None
    ) -> HeldLock: ...

    def is_locked(self, name: str) -> bool: ...

    def get_active_locks(self) -> list[LockInfo]: ...

    def force_release(self, name: str) -> bool: ...

    async def aacquire(
        self, name: str, *, ttl_ms: Duration | None = None, owner: str | None = None
    ) -> HeldLock | None: ...

    async def await_acquire(
        self, name: str, *, timeout_ms: Duration, ttl_ms: Duration | None = None, owner: str | None = None
    ) -> HeldLock: ...

    async def ais_locked(self, name: str) -> bool: ...

    async def aget_active_locks(self) -> list[LockInfo]: ...

    async def aforce_release(self, name: str) -> bool: ...


class ChunkWriter(AbstractAsyncContextManager["ChunkWriter"], Protocol):
    """Writes chunks to one stream. It is an asynchronous context manager."""

    @property
    def stream_id(self) -> str: ...

    @property
    def run_id(self) -> str: ...

    @property
    def agent_name(self) -> str: ...

    async def write(self, chunk: dict[str, Any]) -> int: ...

    async def write_many(self, chunks: Iterable[dict[str, Any]]) -> int: ...

    async def heartbeat(self) -> None: ...

    async def close(self) -> None: ...


class ChunkReader(Protocol):
    """Iterates over the chunks after a position, with their sequences."""

    @property
    def stream_id(self) -> str: ...

    @property
    def status(self) -> StreamStatus: ...

    @property
    def position(self) -> int: ...

    def __aiter__(self) -> AsyncIterator[StoredChunk]: ...

    async def __anext__(self) -> StoredChunk: ...

    async def aclose(self) -> None: ...


class StreamManager(Protocol):
    """Chunks of running sessions, as `helix_store.testing.StreamManagerContract` tests them."""

    async def create_writer(
        self, stream_id: str, run_id: str, agent_name: str, *, fencing_token: int | None = None
    ) -> ChunkWriter: ...

    def write_sync(
        self, stream_id: str, chunks: Iterable[dict[str, Any]], *, fencing_token: int | None = None
    ) -> int: ...

    async def create_reader(self, stream_id: str) -> AsyncIterator[dict[str, Any]] | None: ...

    async def create_resumable_reader(
        self, stream_id: str, *, from_sequence: int = 0
    ) -> ChunkReader | None: ...

    def read_after(self, stream_id: str, from_sequence: int, *, limit: int = 500) -> list[StoredChunk]: ...

    async def end_stream(
        self, stream_id: str, output: Any = None, *, fencing_token: int | None = None
    ) -> None: ...

    async def fail_stream(self, stream_id: str, error: Any, *, fencing_token: int | None = None) -> None: ...

    async def pause_stream(self, stream_id: str, *, fencing_token: int | None = None) -> None: ...

    async def reactivate_stream(self, stream_id: str, *, fencing_token: int | None = None) -> None: ...

    async def reset_stream(self, stream_id: str, *, fencing_token: int | None = None) -> None: ...

    async def get_info(self, stream_id: str) -> StreamInfo | None: ...

    async def delete_stream(self, stream_id: str) -> bool: ...

    async def prune(
        self,
        *,
        older_than: timedelta | datetime | None,
        keep_chunks: int | None = None,
        dry_run: bool = False,
    ) -> PrunedStreams: ...
