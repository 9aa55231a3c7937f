"""The packages of the frameworks: their names, and what is said where the framework is not installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from configparser import ConfigParser
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured

from tests.cells import for_each

ROOT = Path(__file__).parent.parent.parent

PACKAGES = {
    "agent_framework": ("agent_framework", "agent-framework"),
    "claude_agent": ("claude_agent_sdk", "claude-agent"),
    "google_adk": ("google.adk", "google-adk"),
    "langgraph": ("langgraph", "langgraph"),
    "openai_agents": ("agents", "openai-agents"),
    "pydantic_ai": ("pydantic_ai", "pydantic-ai"),
    "strands": ("strands", "strands"),
}


_STORED = {
    "claude_agent": ("DjangoClaudeSessions", "DjangoSessionStore"),
    "langgraph": ("DjangoSaver", "DjangoStore"),
    "openai_agents": ("RunStateStore",),
    "pydantic_ai": ("DjangoConversationStore",),
}
"""Names that need tables of their own package."""


def test_a_name_that_needs_tables_says_so_without_its_app(settings: Any) -> None:
    settings.INSTALLED_APPS = [
        app for app in settings.INSTALLED_APPS if not app.startswith("helix_store.contrib")
    ]
    said = {}
    for package in _STORED:
        module = import_module(f"helix_store.contrib.{package}")
        for name in module.__all__:
            try:
                getattr(module, name)
            except ImproperlyConfigured as exc:
                said[package, name] = str(exc)
    assert set(said) == {(package, name) for package, names in _STORED.items() for name in names}
    assert said["langgraph", "DjangoSaver"] == (
        "DjangoSaver needs the tables of helix_store.contrib.langgraph: "
        'add "helix_store.contrib.langgraph" to INSTALLED_APPS, and migrate.'
    )


def test_the_extras_have_a_cap_and_tox_tests_their_oldest_versions() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    ranges = [
        re.fullmatch(r"([\w-]+)>=([\d.]+),<\d+", each)
        for _, name in PACKAGES.values()
        for each in extras[name]
    ]
    assert all(ranges)
    in_dev = [each for each in ranges if each and each[1] not in ("google-adk", "agent-framework-core")]
    tox = ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    tested = tox["testenv:oldest_frameworks"]["deps"].split()[1:]
    assert sorted(f"{each[1]}=={each[2]}" for each in in_dev) == sorted(tested)


_RENAMED = {
    ("agent_framework", "DjangoSessionStore"): "DjangoAgentSessions",
    ("claude_agent", "DjangoSessionStore"): "DjangoClaudeSessions",
}
"""Names from before a renaming, which are aliases."""


@for_each("package", PACKAGES)
def test_every_name_of_a_package_is_there(package: str) -> None:
    pytest.importorskip(PACKAGES[package][0])
    module = import_module(f"helix_store.contrib.{package}")
    for name in module.__all__:
        assert getattr(module, name).__name__ == _RENAMED.get((package, name), name)


@for_each("package", PACKAGES)
def test_another_name_is_an_attribute_error(package: str) -> None:
    module = import_module(f"helix_store.contrib.{package}")
    with pytest.raises(AttributeError, match="has no attribute 'Unknown'"):
        module.Unknown  # noqa: B018  the access is the test


_OLD = """
import sys
import django

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Finder())
django.setup()
from helix_store.contrib import {package}
try:
    {package}.{name}
except ModuleNotFoundError:
    raise
except ImportError as exc:
    print(exc)
"""


@pytest.mark.parametrize(
    ("package", "module", "name", "distribution"),
    [
        ("pydantic_ai", "pydantic_ai.conversation_store", "DjangoConversationStore", "pydantic-ai-slim"),
        ("openai_agents", "agents.memory.session_settings", "DjangoSession", "openai-agents"),
    ],
)
def test_too_old_a_framework_is_said_to_be_too_old_and_not_to_be_missing(
    package: str, module: str, name: str, distribution: str
) -> None:
    ended = _run(_OLD.format(module=module, package=package, name=name))
    assert f"in a version other than {distribution} {version(distribution)}" in ended
    assert ended.endswith(f'pip install -U "helix_store[{PACKAGES[package][1]}]"\n')


_WITHOUT = """
import sys
import django

class Finder:
    def find_spec(self, name, path=None, target=None):
        if f"{{name}}.".startswith("{framework}."):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Finder())
django.setup()
from helix_store.contrib import {package}
try:
    {package}.{name}
except ModuleNotFoundError:
    raise
except ImportError as exc:
    print(exc)
"""


@for_each("package", PACKAGES)
def test_the_app_is_installed_without_its_framework_and_a_name_tells_the_extra(package: str) -> None:
    framework, extra = PACKAGES[package]
    name = import_module(f"helix_store.contrib.{package}").__all__[0]
    script = _WITHOUT.format(framework=framework, package=package, name=name)
    assert _run(script).endswith(f'pip install "helix_store[{extra}]"\n')


def _run(script: str) -> str:
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"}
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
