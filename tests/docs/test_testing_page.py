"""The tests that docs/testing.md shows pass in a project of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_examples import ROOT

_BLOCK = re.compile(r"^```python\n# tests/test_agent\.py\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ASYNCIO = "asyncio_default_fixture_loop_scope = function\n"
_SETTINGS = """
import helix_store
INSTALLED_APPS = ["django.contrib.auth", "django.contrib.contenttypes", "helix_store"]
SECRET_KEY = "a"
USE_TZ = True
DATABASES = {"default": {
    "ENGINE": "django.db.backends.sqlite3", "NAME": "db.sqlite3", "OPTIONS": helix_store.sqlite_options(),
    "TEST": {"NAME": "test.sqlite3"}}}
"""


@pytest.mark.thorough
def test_the_tests_of_the_page_pass(tmp_path: Path) -> None:
    blocks = _BLOCK.findall((ROOT / "docs" / "testing.md").read_text())
    (tmp_path / "test_agent.py").write_text("\n\n".join(blocks))
    (tmp_path / "project_settings.py").write_text(_SETTINGS)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\nDJANGO_SETTINGS_MODULE = project_settings\n{_ASYNCIO}")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "DJANGO"))
    }
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:langsmith_plugin", "-p", "no:xdist", "-W", "error"],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    tests = sum(block.count("def test_") for block in blocks)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{tests} passed" in ended.stdout
