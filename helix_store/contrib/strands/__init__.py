"""Sessions of Strands Agents: `DjangoSessionRepository` keeps them as items of sessions. It is no Django app.

The class is imported when it is first used, so that this package can be imported without the framework.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from helix_store.contrib.strands.repository import DjangoSessionRepository

__all__ = ["DjangoSessionRepository"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from helix_store.contrib.strands import repository
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.partition(".")[0] != "strands":
            raise
        raise ImportError(
            f'{name} needs Strands Agents: pip install "helix_store[strands]"', name=exc.name
        ) from exc
    return getattr(repository, name)
