"""The pages that build a project can be followed from their first command to the last output."""

from __future__ import annotations

import importlib.util
import re
import shutil
import socket
import urllib.request
from collections.abc import Iterator
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Final
from urllib.parse import urlencode

import django
import pytest

from tests.docs.projects import File, Project, blocks_of
from tests.docs.test_examples import ROOT

QUICKSTART: Final = (ROOT / "docs" / "quickstart.md").read_text()
TUTORIAL: Final = (ROOT / "docs" / "tutorial.md").read_text()
TASKS: Final = "django.tasks" if django.VERSION >= (6, 0) else "django_tasks"
WORKERS: Final = (ROOT / "docs" / "workers.md").read_text()
_QUEUES: Final = (ROOT / "docs" / "queues-and-cron.md").read_text().replace("django.tasks", TASKS)
DJANGO_TASKS, TABLE_AND_CELERY = _QUEUES.split("## Tasks in a table")
TASKS_IN_A_TABLE, CELERY = TABLE_AND_CELERY.split("## Celery")

TWICE: Final = """
import os
import threading

import django

os.environ["DJANGO_SETTINGS_MODULE"] = "travel.settings"
django.setup()

from desk import tasks, tools
from helix_store import DatabaseStateStore

session = DatabaseStateStore().new_session("wien", agent_type="travel")
session.say({"role": "user", "content": "Is there a room in Wien?"})
is_searching, may_go_on = threading.Event(), threading.Event()
search = tools.search_rooms


def held_search(*arguments, **named):
    is_searching.set()
    assert may_go_on.wait(60)
    return search(*arguments, **named)


tools.TOOLS["search_rooms"] = held_search
tasks.PATIENCE_SECONDS = 0
first = threading.Thread(target=ENQUEUE, args=["wien"])
first.start()
assert is_searching.wait(60)
second = ENQUEUE("wien")
print(OUTCOME)
may_go_on.set()
first.join()
ENQUEUE("wien")
print(len(session.store.list_runs("wien")), "run", [head.step_id for head in session.checkpoints().items])
print([message["role"] for message in session.messages()])
"""

ONCE: Final = """\
step 1: search_rooms Wien
SessionBusy
step 2: Room 14 in Wien: free, 90 euros
wien: completed, step 2
wien: completed, step 2
1 run ['step-2', 'step-1']
['user', 'assistant', 'tool', 'assistant']
"""


def needs(module: str) -> pytest.MarkDecorator:
    is_missing = importlib.util.find_spec(module.partition(".")[0]) is None
    return pytest.mark.skipif(is_missing, reason=f"{module} is not installed")


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    with Project(tmp_path) as project:
        yield project


@pytest.fixture(scope="module")
def desk_without_sessions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the project of the tutorial is, migrated and with all its files."""
    folder = tmp_path_factory.mktemp("tutorial")
    with Project(folder) as project:
        project.follow(TUTORIAL.partition("## A session")[0])
        write_files(project, TUTORIAL)
    return folder


@pytest.fixture
def travel_desk(desk_without_sessions: Path, tmp_path: Path) -> Iterator[Project]:
    shutil.copytree(desk_without_sessions, tmp_path, dirs_exist_ok=True)
    with Project(tmp_path) as project:
        project.run("cd travel")
        yield project


def write_files(project: Project, page: str) -> None:
    for block in blocks_of(page):
        if isinstance(block, File) and not block.path.endswith("settings.py"):
            project.write(block)


def test_the_quickstart_can_be_followed_from_an_empty_folder_to_the_admin(project: Project) -> None:
    assert project.follow(QUICKSTART) == 11
    (server,) = re.findall(r"^```sh\n(.*)\n```$", QUICKSTART, re.MULTILINE)
    (page,) = re.findall(r"<http://127.0.0.1:8000(\S+)>", QUICKSTART)
    ((name, password),) = re.findall(r"log in as `(\w+)` with `(\w+)`", QUICKSTART)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    project.run(f"PYTHONWARNINGS= {server} {port} >server.log &")
    project.run(f"until (: </dev/tcp/127.0.0.1/{port}) 2>/dev/null; do sleep 0.1; done")
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(cookies := CookieJar()))
    browser.open(address := f"http://127.0.0.1:{port}/admin/login/?next={page}").close()
    token = next(cookie.value for cookie in cookies)
    form = {"username": name, "password": password, "csrfmiddlewaretoken": token, "next": page}
    with browser.open(address, urlencode(form).encode()) as response:
        sessions = response.read().decode()
    (shown,) = re.findall(rf'href="({page}[^"]*)">(?:(?!</a>).)*title="second"', sessions)
    with browser.open(f"http://127.0.0.1:{port}{shown}") as response:
        session = response.read().decode()
    assert "Your order is on its way." in session
    assert re.findall(r">\s*Step (\d)\s*<", session) == ["1", "2"]


def test_the_tutorial_can_be_followed(project: Project) -> None:
    assert project.follow(TUTORIAL) > 15


def test_the_page_of_workers_can_be_followed(travel_desk: Project) -> None:
    assert travel_desk.follow(WORKERS) == 4


@needs(TASKS)
def test_the_page_of_queues_can_be_followed_with_django_tasks(travel_desk: Project) -> None:
    assert travel_desk.follow(DJANGO_TASKS) == 8


@needs("django_tasks_db")
@needs(TASKS)
def test_the_page_of_queues_can_be_followed_with_tasks_in_a_table(travel_desk: Project) -> None:
    write_files(travel_desk, DJANGO_TASKS)
    assert travel_desk.follow(TASKS_IN_A_TABLE) == 11


@needs("celery")
def test_the_page_of_queues_can_be_followed_with_celery(travel_desk: Project) -> None:
    write_files(travel_desk, DJANGO_TASKS)
    assert travel_desk.follow(CELERY) == 2


@needs(TASKS)
def test_of_two_django_tasks_at_once_one_is_busy_and_no_step_is_doubled(travel_desk: Project) -> None:
    write_files(travel_desk, DJANGO_TASKS)
    outcome = "second.errors[0].exception_class_path.rpartition('.')[2]"
    assert run_twice(travel_desk, "tasks.drive.enqueue", outcome) == ONCE


@needs("celery")
def test_of_two_celery_tasks_at_once_one_is_busy_and_no_step_is_doubled(travel_desk: Project) -> None:
    write_files(travel_desk, DJANGO_TASKS + CELERY)
    travel_desk.write(File("travel/settings.py", "CELERY_TASK_ALWAYS_EAGER = True\n"))
    assert run_twice(travel_desk, "tasks.drive.delay", "type(second.result).__name__") == ONCE


def run_twice(project: Project, enqueue: str, outcome: str) -> str:
    """Enqueue a task, the same one while it is in its first step, and once more when it has ended."""
    project.write(File("twice.py", TWICE.replace("ENQUEUE", enqueue).replace("OUTCOME", outcome)))
    return project.run("python twice.py")
