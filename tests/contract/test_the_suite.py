"""The contract suite itself: it needs pytest alone, hides none of its tests, and catches faulty stores."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from helix_store.core.contracts import (
    REQUIRED_METHODS,
    StateStore,
    require_state_store,
)
from helix_store.core.limits import Limits
from helix_store.engine.memory import MemoryWorld
from helix_store.exceptions import SessionNotFound
from helix_store.stores import DatabaseStateStore
from helix_store.stores.store import InMemoryStateStore
from helix_store.testing import StateStoreContract
from helix_store.testing.cells import table
from helix_store.testing.state_store import StoreTests
from tests.cells import for_each
from tests.contract.faulty_stores import FAULTS

ROOT = Path(__file__).resolve().parents[2]

CONFTEST = """
import django
from django.conf import settings

settings.configure(SECRET_KEY="for this test", INSTALLED_APPS=["helix_store"])
django.setup()
"""
OWN_STORE = """
from helix_store.stores.store import InMemoryStateStore
from helix_store.engine.memory import MemoryWorld
from helix_store.testing import StateStoreContract


class TestMyStore(StateStoreContract):
    world = None

    def make_store(self, *, tenant="", limits=None):
        self.world = self.world or MemoryWorld()
        return InMemoryStateStore(tenant=tenant, limits=limits, world=self.world)
"""
# A pool with one thread too few: the last call waits for a thread, and the others wait for the last call.
DEAD_THREAD = """
from concurrent.futures import ThreadPoolExecutor

from helix_store.testing import base

base._PATIENCE_SECONDS = 0.1
base.ThreadPoolExecutor = lambda size: ThreadPoolExecutor(size - 1)
base.SuiteTests().at_once(*[lambda: print("called")] * 3)
"""


def _pytest(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, text=True, check=False)


def test_no_part_of_the_suite_hides_a_test_of_another() -> None:
    parts = StateStoreContract.__mro__[1:-2]
    names = Counter(name for part in parts for name in vars(part) if not name.startswith("__"))
    assert [name for name, count in names.items() if count > 1] == []
    assert sum(name.startswith("test_") for name in names) > 250


def test_the_suite_needs_no_plugin_of_pytest_and_no_database(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_my_store.py").write_text(OWN_STORE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    plugins = ("django", "asyncio", "hypothesispytest", "xdist", "pytest_cov", "anyio")
    run = _pytest(
        *(f"-pno:{plugin}" for plugin in plugins),
        f"--override-ini=pythonpath={ROOT}",
        "test_my_store.py",
        cwd=tmp_path,
    )
    assert run.returncode == 0, run.stdout
    assert " passed" in run.stdout


def test_calls_at_once_fail_if_one_of_their_threads_does_not_start() -> None:
    command = [sys.executable, "-c", CONFTEST + DEAD_THREAD]
    # Without a timeout of the barrier the process would never end.
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1] == "threading.BrokenBarrierError"
    assert run.stdout == ""


class Tables(StoreTests):
    """Tests with tables, of which some cells fail."""

    def __init__(self) -> None:
        self.world, self.tried = MemoryWorld(), [0, 0]

    def make_store(self, *, tenant: str = "", limits: Limits | None = None) -> InMemoryStateStore:
        return InMemoryStateStore(tenant=tenant, limits=limits, world=self.world)

    @table("number", [1, 2, 3])
    @table(("text", "is_empty"), [("a", False), ("", True)])
    def test_apart(self, store: StateStore, session_id: str, number: int, text: str, is_empty: bool) -> None:
        self.tried[0] += 1
        store.create_session("session", agent_type="agent")
        assert {head.session_id for head in store.list_sessions().sessions} == {"session", session_id}
        assert (text == "") is is_empty
        assert number != 2

    @table("number", [1, 2, 3], shared=True)
    def test_shared(self, store: StateStore, number: int) -> None:
        self.tried[1] += 1
        with pytest.raises(SessionNotFound):
            store.get_messages("nobody") if number < 3 else store.list_sessions()

    @table("number", [1, 2], shared=True)
    def test_skipped(self, number: int) -> None:
        pytest.skip("not here")


def test_a_table_tries_every_cell_and_reports_those_that_fail() -> None:
    tables: Any = Tables()
    with pytest.raises(AssertionError) as caught:
        tables.test_apart(None)
    first, *failures = str(caught.value).splitlines()
    assert (first, tables.tried[0]) == ("2 of 6 cells fail:", 6)
    assert [line for line in failures if line.startswith("- ")] == [
        line for line in failures if line.startswith(("- number=2, text='a'", "- number=2, text=''"))
    ]
    with pytest.raises(AssertionError, match=r"1 of 3 cells fail:\n- number=3: Failed: DID NOT RAISE"):
        tables.test_shared(None, store=tables.make_store())
    assert tables.tried[1] == 3
    with pytest.raises(pytest.skip.Exception, match="not here"):
        tables.test_skipped(None)


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Of every faulty store, the tests that failed."""
    report = tmp_path_factory.mktemp("faults") / "report.xml"
    run = _pytest("tests/contract/faulty_stores.py", f"--junit-xml={report}", cwd=ROOT)
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout
    failures: dict[str, set[str]] = {name: set() for name in FAULTS}
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314  our own report
        if case.find("failure") is not None:
            failures[case.attrib["classname"].rpartition(".")[2]].add(case.attrib["name"].partition("[")[0])
    return failures


@for_each("store", FAULTS)
def test_a_faulty_store_fails_at_the_test_that_is_about_its_fault(
    failed: dict[str, set[str]], store: str
) -> None:
    assert FAULTS[store] in failed[store]


# --- Refusing what is no store ----------------------------------------------------------------------


@for_each("store_class", [InMemoryStateStore, DatabaseStateStore])
def test_our_stores_are_state_stores(store_class: type[StateStore]) -> None:
    require_state_store(store_class())


@for_each("missing", REQUIRED_METHODS)
def test_a_store_that_lacks_any_method_is_refused_by_name(missing: str) -> None:
    faulty = type("Faulty", (InMemoryStateStore,), {missing: "not callable"})
    with pytest.raises(TypeError, match=rf"Faulty .* {missing}\.") as caught:
        require_state_store(faulty())
    assert not {name for name in REQUIRED_METHODS if name != missing and f" {name}," in str(caught.value)}


def test_everything_that_is_missing_is_named_at_once() -> None:
    with pytest.raises(TypeError) as caught:
        require_state_store(object())
    assert all(name in str(caught.value) for name in REQUIRED_METHODS)
