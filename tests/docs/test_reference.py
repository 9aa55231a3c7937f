"""The reference is complete: signatures of all public names, errors, defaults of settings."""

from __future__ import annotations

import re
from ast import literal_eval
from collections import Counter
from importlib import import_module
from typing import Any, Final

import helix_store
from helix_store import conf, exceptions
from tests.docs.test_examples import ROOT
from tests.test_layout import ALL_NAMES, NOT_IN_DEV

_PAGES: Final = sorted((ROOT / "docs").glob("api*.md"))
_SHOWN: Final = [
    path for page in _PAGES for path in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
]
_ON_THE_PAGE_OF_THE_SCHEMA: Final = "helix_store.models"


def _found(path: str) -> Any:
    room, _, name = path.rpartition(".")
    return getattr(import_module(room), name)


def _is_here(path: str) -> bool:
    """Return whether the framework of a name may be imported: the extra "dev" leaves two of them out."""
    return path.rpartition(".")[0] not in NOT_IN_DEV


def test_the_pages_of_the_api_show_each_public_name_once() -> None:
    public = {f"{path}.{name}" for (path, _), names in ALL_NAMES.items() for name in names.split()}
    public |= {f"helix_store.{name}" for name in helix_store.__all__} - {"helix_store.__version__"}
    public -= {path for path in public if path.rpartition(".")[0] == _ON_THE_PAGE_OF_THE_SCHEMA}
    of_errors = [f"helix_store.exceptions.{name}" for name in exceptions.__all__]
    shown = [*_SHOWN, *of_errors]
    assert [path for path, count in Counter(shown).items() if count > 1] == []
    objects = {id(_found(path)) for path in shown if _is_here(path)}
    assert [path for path in sorted(public) if _is_here(path) and id(_found(path)) not in objects] == []
    # The page shows a class with an earlier name under its new one.
    earlier = "helix_store.contrib.agent_framework.DjangoSessionStore"
    assert {path for path in public if not _is_here(path)} - {earlier} <= set(shown)


def test_the_page_of_errors_names_each_error() -> None:
    text = (ROOT / "docs" / "errors.md").read_text()
    named = {
        name
        for row in re.findall(r"^\| (.+?) \|", text, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    assert set(exceptions.__all__) - named - {"HelixStoreError"} == set()


def test_the_page_of_settings_shows_the_default_of_each_setting() -> None:
    text = (ROOT / "docs" / "settings.md").read_text()
    shown = dict(re.findall(r"^\| `([A-Z_]+)` \| `(.+?)` \|", text, re.MULTILINE))
    assert {name: literal_eval(shown[name]) for name in conf.DEFAULTS} == conf.DEFAULTS
