"""Which of two interrupt requests stands."""

from __future__ import annotations

from helix_store.core.types import InterruptKind, InterruptRequest

__all__ = ["is_bound_to", "standing_request"]


def standing_request(pending: InterruptRequest | None, wanted: InterruptRequest) -> InterruptRequest:
    """The request to keep: an abort replaces an interrupt, never the other way round; else the newer one."""
    if pending is not None and pending.kind == InterruptKind.ABORT and wanted.kind != InterruptKind.ABORT:
        return pending
    return wanted


def is_bound_to(request: InterruptRequest, run_id: str | None) -> bool:
    """Whether a check on behalf of ``run_id`` sees the request; ``None`` sees every request."""
    return run_id is None or request.run_id == run_id
