"""The packages of the frameworks: their names, and what is said where the framework is not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

PACKAGES = {
    "claude_agent": ("claude_agent_sdk", "claude-agent"),
    "langgraph": ("langgraph", "langgraph"),
    "openai_agents": ("agents", "openai-agents"),
    "pydantic_ai": ("pydantic_ai", "pydantic-ai"),
    "strands": ("strands", "strands"),
}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_of_a_package_is_there(package: str) -> None:
    module = import_module(f"helix_store.contrib.{package}")
    for name in module.__all__:
        assert getattr(module, name).__name__ == name


@pytest.mark.parametrize("package", PACKAGES)
def test_another_name_is_an_attribute_error(package: str) -> None:
    module = import_module(f"helix_store.contrib.{package}")
    with pytest.raises(AttributeError, match="has no attribute 'Unknown'"):
        module.Unknown  # noqa: B018  the access is the test


_WITHOUT = """
import sys
import django

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {framework!r}:
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


@pytest.mark.parametrize("package", PACKAGES)
def test_the_app_is_installed_without_its_framework_and_a_name_tells_the_extra(package: str) -> None:
    framework, extra = PACKAGES[package]
    name = import_module(f"helix_store.contrib.{package}").__all__[0]
    script = _WITHOUT.format(framework=framework, package=package, name=name)
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"}
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.endswith(f'pip install "helix_store[{extra}]"\n')
