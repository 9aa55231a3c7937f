"""Names that are imported at their first use: an app is installed also where its framework is not."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["lazily"]


def lazily(package: str, framework: str, extra: str, **homes: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package whose names have these modules as their homes.

    Without the framework a name is an `ImportError` that says which extra to install.
    """

    def attribute(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(import_module(f"{package}.{homes[name]}"), name)
        except ModuleNotFoundError as exc:
            if exc.name is None or exc.name.partition(".")[0] == "helix_store":
                raise
            raise ImportError(
                f'{name} needs {framework}: pip install "helix_store[{extra}]"', name=exc.name
            ) from exc

    return attribute
