"""The names that row-level security uses in PostgreSQL."""

from __future__ import annotations

from typing import Final

TENANT_POLICY: Final = "helix_store_tenant"
"""The policy on each table. Do not rename it: old policies would stay in databases."""

TENANT_VARIABLE: Final = "helix_store.tenant"
"""The value holds a colon and the tenant, because the default tenant and an unset variable are both empty."""
