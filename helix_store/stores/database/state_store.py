"""The state store in the project's own database."""

from __future__ import annotations

from helix_store import conf
from helix_store.core import validation
from helix_store.core.limits import Limits
from helix_store.stores.api import StateStoreBase
from helix_store.stores.database.backend import DatabaseBackend
from helix_store.stores.database.scope import Scope

__all__ = ["DatabaseStateStore"]


class DatabaseStateStore(StateStoreBase):
    """Durable agent sessions in a Django database.

    ``using`` is a database alias, by default the one that the project's routers name for writing sessions.
    Ids are unique within ``tenant`` and another tenant's ids do not exist. Each write is one transaction
    that joins the caller's own ``atomic()`` block: a step and the caller's rows commit together.
    Source: the state store of the PostgreSQL store document.
    """

    def __init__(self, using: str | None = None, *, tenant: str = "", limits: Limits | None = None) -> None:
        conf.require_usable_prefix()
        scope = Scope(using, validation.tenant(tenant), limits)
        super().__init__(DatabaseBackend(scope), tenant=scope.tenant, limits=limits)
        self._scope = scope

    @property
    def alias(self) -> str:
        """The database that the store works on."""
        return self._scope.alias
