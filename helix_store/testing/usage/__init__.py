"""The contract suite of a usage store: a class for each part, and `UsageStoreContract` for all."""

from helix_store.testing.usage.arguments import UsageArgumentContract
from helix_store.testing.usage.async_twins import AsyncUsageContract
from helix_store.testing.usage.base import UsageTests
from helix_store.testing.usage.deleting import UsageDeletionContract
from helix_store.testing.usage.querying import UsageQueryContract, UsageTenantContract
from helix_store.testing.usage.recording import RecordingContract, UsageEntryContract
from helix_store.testing.usage.rollups import RollupContract, UsageTreeContract
from helix_store.testing.usage.time_series import TimeSeriesContract

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
    """All tests of a usage store."""
