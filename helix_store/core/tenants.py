"""How the tenant of a transaction is told to PostgreSQL."""

from __future__ import annotations

from typing import Final

__all__ = ["TENANT_VARIABLE"]

TENANT_VARIABLE: Final = "helix_store.tenant"
"""It holds a colon and the tenant: the default tenant is empty, and so is a variable that is not set."""
