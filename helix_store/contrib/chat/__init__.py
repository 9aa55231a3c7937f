"""A durable chat behind one mount, which speaks AG-UI and the UI message stream of the AI SDK."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from helix_store.contrib.chat.out import Out
    from helix_store.contrib.chat.turns import ChatTurn, Client
    from helix_store.contrib.chat.views import Chat

__all__ = ["Chat", "ChatTurn", "Client", "Out"]

if not TYPE_CHECKING:  # If a type checker sees this function, it accepts every misspelt name as a public one.

    def __getattr__(name: str) -> Any:
        # The package is an app, so importing it must not import models.
        from importlib import import_module

        homes = {"Chat": "views", "Out": "out", "ChatTurn": "turns", "Client": "turns"}
        if name not in homes:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{homes[name]}"), name)
