"""The contract suite of a state store: a class for each part, and `StateStoreContract` for all."""

from helix_store.testing.state_store.approvals import ApprovalContract
from helix_store.testing.state_store.arguments import ArgumentContract
from helix_store.testing.state_store.async_twins import AsyncTwinContract, SignatureContract
from helix_store.testing.state_store.base import (
    HeldLock,
    LockManager,
    StoreTests,
)
from helix_store.testing.state_store.branching import BranchingContract
from helix_store.testing.state_store.checkpoints import CheckpointContract
from helix_store.testing.state_store.deadlines import DeadlineContract
from helix_store.testing.state_store.decisions import DecisionContract
from helix_store.testing.state_store.effects import EffectContract
from helix_store.testing.state_store.errors import ErrorContract
from helix_store.testing.state_store.identifiers import IdentifierContract
from helix_store.testing.state_store.interrupts import InterruptContract
from helix_store.testing.state_store.limits import LimitContract
from helix_store.testing.state_store.listing import ListingContract
from helix_store.testing.state_store.messages import MessageContract
from helix_store.testing.state_store.operations import OperationContract
from helix_store.testing.state_store.ownership import OwnershipContract
from helix_store.testing.state_store.paging import PagingContract
from helix_store.testing.state_store.payloads import PayloadContract
from helix_store.testing.state_store.posts import PostContract
from helix_store.testing.state_store.restoring import RestoringContract
from helix_store.testing.state_store.resumed_states import ResumedStateContract
from helix_store.testing.state_store.runs import RunContract
from helix_store.testing.state_store.saving import CustomStateContract, SavingContract
from helix_store.testing.state_store.sessions import SessionContract
from helix_store.testing.state_store.staging import StagingContract
from helix_store.testing.state_store.statuses import StatusContract
from helix_store.testing.state_store.steps import StepContract
from helix_store.testing.state_store.sub_sessions import SubSessionContract
from helix_store.testing.state_store.suspension import SuspensionContract
from helix_store.testing.state_store.tool_calls import ToolCallContract
from helix_store.testing.state_store.trees import TreeContract
from helix_store.testing.state_store.unknown_sessions import TenantContract, UnknownSessionContract
from helix_store.testing.state_store.used_approvals import UsedApprovalContract
from helix_store.testing.state_store.versions import FencingContract, VersionContract

__all__ = [
    "ApprovalContract",
    "ArgumentContract",
    "AsyncTwinContract",
    "BranchingContract",
    "CheckpointContract",
    "CustomStateContract",
    "DeadlineContract",
    "DecisionContract",
    "EffectContract",
    "ErrorContract",
    "FencingContract",
    "HeldLock",
    "IdentifierContract",
    "InterruptContract",
    "LimitContract",
    "ListingContract",
    "LockManager",
    "MessageContract",
    "OperationContract",
    "OwnershipContract",
    "PagingContract",
    "PayloadContract",
    "PostContract",
    "RestoringContract",
    "ResumedStateContract",
    "RunContract",
    "SavingContract",
    "SessionContract",
    "SignatureContract",
    "StagingContract",
    "StateStoreContract",
    "StatusContract",
    "StepContract",
    "StoreTests",
    "SubSessionContract",
    "SuspensionContract",
    "TenantContract",
    "ToolCallContract",
    "TreeContract",
    "UnknownSessionContract",
    "UsedApprovalContract",
    "VersionContract",
]


class StateStoreContract(
    SignatureContract,
    SessionContract,
    SavingContract,
    StatusContract,
    CustomStateContract,
    ListingContract,
    PagingContract,
    MessageContract,
    StagingContract,
    StepContract,
    OperationContract,
    CheckpointContract,
    RestoringContract,
    BranchingContract,
    RunContract,
    SubSessionContract,
    InterruptContract,
    ToolCallContract,
    ApprovalContract,
    UsedApprovalContract,
    DecisionContract,
    OwnershipContract,
    TreeContract,
    DeadlineContract,
    SuspensionContract,
    ResumedStateContract,
    VersionContract,
    UnknownSessionContract,
    TenantContract,
    IdentifierContract,
    ArgumentContract,
    ErrorContract,
    PayloadContract,
    LimitContract,
    FencingContract,
    AsyncTwinContract,
):
    """All tests of a state store."""
