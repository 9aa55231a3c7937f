"""The agents of the frameworks, run as a reader of the example project runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_the_agents_of_all_frameworks_run_twice_on_one_database(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "DATABASE_URL": f"sqlite:///{tmp_path / 'db.sqlite3'}",
        # With DEBUG, as in the project as it is: Django then logs every statement.
        "DEBUG": "1",
        "DJANGO_SETTINGS_MODULE": "example_project.settings",
    }

    def run(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        ended = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    run("manage.py", "migrate", "--verbosity", "0")
    first = run("-m", "example_project.frameworks")
    for answer in (
        "It is booked.",
        "Bob has his money.",
        "2 entries",
        "a room in Lisbon is booked",
        "Sunny in Lisbon.",
    ):
        assert answer in first
    assert run("-m", "example_project.frameworks").splitlines()[:3] == first.splitlines()[:3]
    listed = json.loads(run("manage.py", "helix_sessions", "list", "--format", "json"))["sessions"]
    types = {session["agent_type"] for session in listed}
    expected = {"claude-agent", "langgraph", "openai_agents", "pydantic_ai", "strands"}
    for agent_type, title in (
        ("agent_framework", "Microsoft Agent Framework"),
        ("google_adk", "Google ADK"),
    ):
        if f"{title}\nis not installed" not in first:
            expected.add(agent_type)
    assert types == expected
