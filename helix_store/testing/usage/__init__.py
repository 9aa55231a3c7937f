"""The contract of a usage store, as tests: a class for each part, and `UsageStoreContract` for all."""

from helix_store.testing.usage.arguments import UsageArgumentContract
from helix_store.testing.usage.async_twins import AsyncUsageContract
from helix_store.testing.usage.base import UsageTests
from helix_store.testing.usage.deleting import UsageDeletionContract
from helix_store.testing.usage.entries import UsageEntryContract
from helix_store.testing.usage.querying import UsageQueryContract
from helix_store.testing.usage.recording import RecordingContract
from helix_store.testing.usage.rollups import RollupContract
from helix_store.testing.usage.tenants import UsageTenantContract
from helix_store.testing.usage.time_series import TimeSeriesContract
from helix_store.testing.usage.trees import UsageTreeContract

__all__ = [
    "AsyncUsageContract",
    "RecordingContract",
    "RollupContract",
    "TimeSeriesContract",
    "UsageArgumentContract",
    "UsageDeletionContract",
    "UsageEntryContract",
    "UsageQueryContract",
    "UsageStoreContract",
    "UsageTenantContract",
    "UsageTests",
    "UsageTreeContract",
]


class UsageStoreContract(
    RecordingContract,
    UsageEntryContract,
    RollupContract,
    UsageTreeContract,
    UsageQueryContract,
    TimeSeriesContract,
    UsageDeletionContract,
    UsageArgumentContract,
    UsageTenantContract,
    AsyncUsageContract,
):
    """Everything a usage store promises."""
