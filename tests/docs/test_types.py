"""Strict type checks of the public names, the dicts that calls take, and the examples that readers copy."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cells import for_each
from tests.docs.projects import File, blocks_of, stages_of
from tests.docs.test_examples import BLOCK, PAGES, ROOT
from tests.docs.test_projects import TASKS
from tests.test_layout import NOT_IN_DEV

TUTORIAL = stages_of((ROOT / "docs" / "tutorial.md").read_text())
WORKERS = stages_of((ROOT / "docs" / "workers.md").read_text())
QUEUES = stages_of((ROOT / "docs" / "queues-and-cron.md").read_text().partition("## Celery")[0])
QUICKSTART = stages_of((ROOT / "docs" / "quickstart.md").read_text())
STAGES = [*QUICKSTART, *TUTORIAL, *({**TUTORIAL[-1], **stage} for stage in (*WORKERS, *QUEUES))]

_FOLLOWED = {"adapters", "quickstart", "queues-and-cron", "tutorial", "workers"}
"""Pages whose files make up a whole project, which a test of its own checks. The file of docs/adapters.md is
one of the tests, so mypy checks it there.
"""

_BEGUN = {
    "urlpatterns +=": "from django.contrib import admin\n"
    "from django.urls import URLPattern, URLResolver, path\n"
    'urlpatterns: list[URLPattern | URLResolver] = [path("admin/", admin.site.urls)]\n',
    "INSTALLED_APPS +=": "INSTALLED_APPS: list[str] = []\n",
    "DATABASES[": "DATABASES: dict[str, dict[str, object]] = {}\n",
}
"""What a file has before the page extends it, by what the page then says."""

_OF_THE_READER = {
    "chat": {"support/payments.py": "def pay(order: object, key: str) -> dict[str, str]:\n    return {}\n"},
    "contract-suite": {
        "my_package.py": "from helix_store import InMemoryStateStore\n\nMyStore = InMemoryStateStore\n"
    },
    "langgraph": {
        "support/graph.py": "from typing import Any\ndef build_graph(saver: Any) -> Any:\n    return saver\n"
    },
}


def _files_of(page: Path) -> list[File]:
    return [block for block in blocks_of(page.read_text()) if isinstance(block, File)]


_WITH_FILES = [page for page in PAGES if page.stem not in _FOLLOWED and _files_of(page)]


@pytest.mark.parametrize("stage", range(len(STAGES)))
def test_the_files_of_a_project_pass_strict_type_checks_at_each_stage(stage: int, tmp_path: Path) -> None:
    files = [tmp_path / path for path in STAGES[stage]]
    for file, text in zip(files, STAGES[stage].values(), strict=True):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    for app in {tmp_path / Path(path).parts[0] for path in STAGES[stage]}:
        (app / "__init__.py").touch()
    require_strict_types(*files)


def test_the_examples_of_the_pages_pass_strict_type_checks(tmp_path: Path) -> None:
    files = []
    for page in PAGES:
        code = "\n".join(block[1] for block in BLOCK.finditer(page.read_text()))
        if code and is_installed(page.stem):
            files.append(tmp_path / f"page_{page.stem.replace('-', '_')}.py")
            files[-1].write_text(code)
    assert len(files) > 40
    require_strict_types(*files)


@for_each("page", _WITH_FILES, ids=lambda page: page.name)
def test_the_files_that_a_page_shows_pass_strict_type_checks(
    page: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A file that the page extends begins as Django writes it, and the reader's own modules are there."""
    folder = tmp_path_factory.mktemp(page.stem)
    texts = dict(_OF_THE_READER.get(page.stem, {}))
    for file in _files_of(page):
        texts[file.path] = texts.get(file.path, "") + file.text.replace("django.tasks", TASKS)
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        begun = [before for sign, before in _BEGUN.items() if sign in text]
        (folder / path).write_text("".join([*begun, text]))
        if (package := (folder / path).parent) != folder:
            (package / "__init__.py").touch()
    require_strict_types(*(folder / path for path in texts))


def is_installed(name: str) -> bool:
    """Return whether the framework of this page, if it is one, can be imported."""
    module = NOT_IN_DEV.get(f"helix_store.contrib.{name.replace('-', '_')}", "django")
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


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
