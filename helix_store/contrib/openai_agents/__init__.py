"""OpenAI Agents SDK:

`DjangoSession` keeps its items, and `RunStateStore` keeps runs that wait for an approval.
"""

from typing import TYPE_CHECKING

from helix_store.contrib._frameworks import lazily

if TYPE_CHECKING:
    from helix_store.contrib.openai_agents.run_states import RunStateClaim, RunStateStore, StoredRunState
    from helix_store.contrib.openai_agents.session import DjangoSession

__all__ = ["DjangoSession", "RunStateClaim", "RunStateStore", "StoredRunState"]

__getattr__ = lazily(
    __name__,
    "OpenAI Agents SDK",
    "openai-agents",
    stored=("RunStateStore",),
    DjangoSession="session",
    RunStateClaim="run_states",
    RunStateStore="run_states",
    StoredRunState="run_states",
)
