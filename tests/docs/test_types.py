"""Strict type checks of the public names, the dicts that calls take, and the examples that readers copy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.projects import stages_of
from tests.docs.test_examples import BLOCK, PAGES, ROOT

TUTORIAL = stages_of((ROOT / "docs" / "tutorial.md").read_text())
WORKERS = stages_of((ROOT / "docs" / "workers.md").read_text())
QUEUES = stages_of((ROOT / "docs" / "queues-and-cron.md").read_text().partition("## Celery")[0])
QUICKSTART = stages_of((ROOT / "docs" / "quickstart.md").read_text())
STAGES = [*QUICKSTART, *TUTORIAL, *({**TUTORIAL[-1], **stage} for stage in (*WORKERS, *QUEUES))]


def test_the_examples_of_the_readme_pass_strict_type_checks(tmp_path: Path) -> None:
    program = tmp_path / "example.py"
    program.write_text("\n".join(block[1] for block in BLOCK.finditer((ROOT / "README.md").read_text())))
    require_strict_types(program)


@pytest.mark.parametrize("stage", range(len(STAGES)))
def test_the_files_of_a_project_pass_strict_type_checks_at_each_stage(stage: int, tmp_path: Path) -> None:
    files = [tmp_path / path for path in STAGES[stage]]
    for file, text in zip(files, STAGES[stage].values(), strict=True):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    for app in {tmp_path / Path(path).parts[0] for path in STAGES[stage]}:
        (app / "__init__.py").touch()
    require_strict_types(*files)


def test_the_examples_of_the_pages_pass_strict_type_checks_as_far_as_they_are_annotated(
    tmp_path: Path,
) -> None:
    """Functions without annotations and results that may be ``None`` are for the reader to complete.

    The pages of the frameworks are left out, whose examples depend on the types of other packages.
    """
    of_frameworks = {
        path.parent.name.replace("_", "-") for path in (ROOT / "helix_store/contrib").glob("*/apps.py")
    }
    files = []
    for page in PAGES:
        code = "\n".join(block[1] for block in BLOCK.finditer(page.read_text()))
        if code and page.stem not in of_frameworks - {"chat"}:
            files.append(tmp_path / f"page_{page.stem.replace('-', '_')}.py")
            files[-1].write_text(code)
    assert len(files) > 30
    lenient = "--allow-untyped-defs --allow-incomplete-defs --allow-untyped-calls"
    lenient += " --disable-error-code union-attr --disable-error-code var-annotated"
    checked = _checked(*lenient.split(), *files)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_strict_type_checks_know_the_names_and_no_other(tmp_path: Path) -> None:
    program = """
from typing import assert_type
from helix_store import DatabaseStateStore, Mispelt, SessionState, StateStore, expired_session_cleanup

store: StateStore = DatabaseStateStore()
assert_type(store.load_state("a"), SessionState | None)
assert_type(expired_session_cleanup().marked, int)
"""
    (error,) = _type_errors(program, tmp_path)
    assert 'Module "helix_store" has no attribute "Mispelt"' in error


def test_dicts_pass_strict_type_checks_and_mispelt_keys_do_not(tmp_path: Path) -> None:
    program = """
from datetime import UTC, datetime, timedelta
from typing import Any
from helix_store import DatabaseStateStore, DatabaseUsageStore, StepInfo
from helix_store.core.dicts import MessageDict, StagedChangesDict, ToolCallDict, UsageEntryDict

store = DatabaseStateStore()
state = store.create_session(agent_type="agent", expires_at=datetime.now(UTC))
inferred = [{"role": "user", "content": "Hello."}]
given: dict[str, Any] = {"role": "user"}
typed: MessageDict = {"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}
store.append_messages("a", [{"role": "user", "content": "Hello.", "key of a provider": 1}])
store.append_messages("a", inferred)
store.append_messages("a", [given, typed])
store.save_state_and_promote_staging("a", state, [typed], StepInfo("step", step_count=1))
call: ToolCallDict = {"tool_name": "ask", "deadline": timedelta(days=7), "on_expiry": {"result": None}}
store.add_pending_tool_calls("a", {"call-1": call, "call-2": {"tool_name": "ask", "note": 1}})
store.suspend("a", kind="suspended_client_tool", context={}, pending={"call-3": {"tool_name": "ask"}})
staged: StagedChangesDict = {
    "tool_call_id": "a", "patches": [{"op": "move", "from": "/a", "path": ["b", 0]}]
}
store.stage_changes("a", "step", staged)
store.stage_changes("a", "step", {"tool_call_id": "a", "merge_changes": {"order": 1}})
entry: UsageEntryDict = {
    "kind": "tool", "session_id": "a", "step_count": 1, "timestamp": datetime.now(UTC),
    "source": {"type": "agent", "name": "a"}, "tool_name": "ask", "success": True,
    "duration_ms": timedelta(seconds=1),
}
DatabaseUsageStore().record_entries([entry, {**entry, "id": "b"}])
with store.session("a").step() as step:
    step.say(typed, {"role": "user"})
    step.wait_for({"call-4": {"tool_name": "ask", "deadline": timedelta(days=7), "on_expiry": "reject"}})

wrong: MessageDict = {"rule": "user"}
"""
    missing, extra = _type_errors(program, tmp_path)
    assert 'Missing key "role"' in missing
    assert 'Extra key "rule"' in extra


def require_strict_types(*files: Path) -> None:
    checked = _checked(*files)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def _type_errors(program: str, folder: Path) -> list[str]:
    file = folder / "program.py"
    file.write_text(program)
    return [line for line in _checked(file).stdout.splitlines() if "error:" in line]


def _checked(*arguments: Path | str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
