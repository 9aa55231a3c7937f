"""The package works where Python cannot watch forks, as on Windows."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Final

import pytest

SCRIPT: Final = """
import os
del os.fork, os.register_at_fork

import django
django.setup()

import helix_store.checkpointers
import helix_store.stores
from helix_store.core.types import SessionState, StepInfo

store = helix_store.stores.InMemoryStateStore()
store.create_session("s", agent_type="t")
state = SessionState(session_id="s", agent_type="t", custom_state={"n": 1})
print(store.save_state_and_promote_staging("s", state, [], StepInfo("step", 1)).new_version)
"""


@pytest.mark.thorough
def test_a_platform_without_fork_hooks_imports_the_stores_and_makes_a_step() -> None:
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT],
        env={
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "tests.settings",
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert finished.stderr == ""
    assert (finished.returncode, finished.stdout) == (0, "2\n")
