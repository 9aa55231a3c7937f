"""What the packages of frameworks share: the base of their app configs, and names that are imported on first
use, so that an app can be installed without its framework.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from importlib import import_module
from importlib.metadata import packages_distributions, version
from typing import Any

from django.apps import AppConfig, apps
from django.core.exceptions import ImproperlyConfigured


class FrameworkConfig(AppConfig):
    """An app that registers the ``TABLES`` and the ``CONVERSATION`` of its module ``catalogue``."""

    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from helix_store.catalogue import register_conversation, register_table

        catalogue = import_module(f"{self.name}.catalogue")
        for table in getattr(catalogue, "TABLES", ()):
            register_table(table)
        if conversation := getattr(catalogue, "CONVERSATION", None):
            register_conversation(conversation)


def lazily(
    package: str,
    framework: str,
    extra: str,
    *,
    within: str = "",
    stored: Collection[str] = (),
    **homes: str,
) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package that imports names from these modules. Without the framework,
    or with a version that lacks a name, it raises an `ImportError` that names the extra to install. For the
    names of ``stored``, which need the tables of the package, it raises `ImproperlyConfigured` unless the
    package is in ``INSTALLED_APPS``. ``within`` is the package of the framework, if it is in a namespace that
    others share.
    """

    def attribute(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            found = getattr(import_module(f"{package}.{homes[name]}"), name)
        except ImportError as exc:
            root = (exc.name or "").partition(".")[0]
            if root in ("", "helix_store"):
                raise
            is_missing = isinstance(exc, ModuleNotFoundError) and exc.name in (root, within)
            need, option = ("", "") if is_missing else (f" in a version other than {_installed(root)}", "-U ")
            raise ImportError(
                f'{name} needs {framework}{need}: pip install {option}"helix_store[{extra}]"', name=exc.name
            ) from exc
        if name in stored and apps.ready and not apps.is_installed(package):
            raise ImproperlyConfigured(
                f'{name} needs the tables of {package}: add "{package}" to INSTALLED_APPS, and migrate.'
            )
        return found

    return attribute


def _installed(root: str) -> str:
    """Return the distributions that contain a top-level package, with their versions."""
    names = sorted(set(packages_distributions().get(root, ())))
    return ", ".join(f"{name} {version(name)}" for name in names)
