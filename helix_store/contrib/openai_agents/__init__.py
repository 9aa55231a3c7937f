"""OpenAI Agents SDK: `DjangoSession` keeps its items, and `RunStateStore` the runs that wait for an approval.

The classes are imported when they are first used, so that the app can be installed without the framework.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from helix_store.contrib.openai_agents.run_states import RunStateClaim, RunStateStore, StoredRunState
    from helix_store.contrib.openai_agents.session import DjangoSession

__all__ = ["DjangoSession", "RunStateClaim", "RunStateStore", "StoredRunState"]

_HOMES: Final = {
    "DjangoSession": "session",
    "RunStateClaim": "run_states",
    "RunStateStore": "run_states",
    "StoredRunState": "run_states",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f"{__name__}.{_HOMES[name]}")
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.partition(".")[0] != "agents":
            raise
        raise ImportError(
            f'{name} needs OpenAI Agents SDK: pip install "helix_store[openai-agents]"', name=exc.name
        ) from exc
    return getattr(module, name)
