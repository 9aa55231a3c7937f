"""What every group of calls shares: a back end, a tenant and the limits."""

from __future__ import annotations

from helix_store import conf
from helix_store.core.limits import Limits
from helix_store.sessions.backend import Backend

__all__ = ["StoreCalls"]


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
        return conf.limits(self._given_limits)
