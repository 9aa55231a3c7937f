"""Transcripts of Claude Agent SDK: `DjangoSessionStore` is its session store in the database of the project.

The class is imported when it is first used, so that the app can be installed without the framework.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from helix_store.contrib.claude_agent.store import DjangoSessionStore

__all__ = ["DjangoSessionStore"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from helix_store.contrib.claude_agent import store
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.partition(".")[0] != "claude_agent_sdk":
            raise
        raise ImportError(
            f'{name} needs Claude Agent SDK: pip install "helix_store[claude-agent]"', name=exc.name
        ) from exc
    return getattr(store, name)
