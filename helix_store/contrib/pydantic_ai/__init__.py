"""Sessions of Pydantic AI: `DjangoConversationStore` keeps its conversations in the tables of this app.

The class is imported when it is first used, so that the app can be installed without the framework.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from helix_store.contrib.pydantic_ai.store import DjangoConversationStore

__all__ = ["DjangoConversationStore"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from helix_store.contrib.pydantic_ai import store
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.partition(".")[0] != "pydantic_ai":
            raise
        raise ImportError(
            f'{name} needs Pydantic AI: pip install "helix_store[pydantic-ai]"', name=exc.name
        ) from exc
    return getattr(store, name)
