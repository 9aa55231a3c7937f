"""What every group of calls shares: a back end, a tenant and the limits."""

from __future__ import annotations

from helix_store import conf
from helix_store.core import validation
from helix_store.core.limits import Limits
from helix_store.core.requests import Guard
from helix_store.stores.backend import Backend

__all__ = ["StoreCalls", "guard"]


class StoreCalls:
    """A store bound to one tenant. ``limits`` given here win over ``HELIX_STORE["LIMITS"]``."""

    def __init__(self, backend: Backend, *, tenant: str, limits: Limits | None) -> None:
        self._backend = backend
        self._tenant = tenant
        self._given_limits = limits

    @property
    def tenant(self) -> str:
        return self._tenant

    @property
    def limits(self) -> Limits:
        return self._given_limits or conf.limits()


def guard(expected_version: int | None = None, fencing_token: int | None = None) -> Guard:
    """Check what a caller requires of a write. Raises `InvalidPayload`."""
    if expected_version is not None:
        validation.whole_number(expected_version, "expected_version")
    if fencing_token is not None:
        validation.whole_number(fencing_token, "fencing_token")
    return Guard(expected_version, fencing_token)
