"""The request that a caller makes for an erasure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from helix_store.cleanup.workspaces import WorkspaceProvider
from helix_store.core import validation
from helix_store.exceptions import InvalidQuery

__all__ = ["ErasureRequest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ErasureRequest:
    """The arguments of `erase`. Raises `InvalidQuery` for an invalid combination."""

    using: str | None = None
    user_id: str | None = None
    session_id: str | None = None
    tenant: str | None = None
    workspace_providers: Mapping[str, WorkspaceProvider] | None = None
    keep_branches: bool = False
    leave_snapshots: bool = False
    force: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        if self.user_id is not None and self.session_id is not None:
            raise InvalidQuery("Pass user_id or session_id, not both.", path="user_id")
        if self.user_id is None and self.session_id is None and self.tenant is None:
            raise InvalidQuery("Pass user_id, session_id or tenant.", path="user_id")
        validation.optional_identifier(self.user_id, "user_id")
        validation.optional_identifier(self.session_id, "session_id")
        if self.tenant is not None:
            validation.tenant(self.tenant)

    @property
    def is_of_tenant(self) -> bool:
        """True if everything in the tenant is erased."""
        return self.user_id is None and self.session_id is None

    @property
    def subject(self) -> tuple[str, str]:
        """The kind of the erased subject, and its id."""
        named = {"user": self.user_id, "session": self.session_id, "tenant": self.tenant}
        return next((kind, name) for kind, name in named.items() if name is not None)
