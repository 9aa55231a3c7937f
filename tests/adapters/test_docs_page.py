"""docs/adapters.md prints the app that is installed here, and its example runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import tests.adapters.third_party
import tests.adapters.third_party.notebook
from helix_store.models import Session
from tests.cells import for_each

APP = Path(tests.adapters.third_party.__file__).parent
PAGE = Path(__file__).resolve().parents[2] / "docs" / "adapters.md"
BLOCKS = dict(
    re.findall(r"^```python\n# ([\w/]+\.py)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
)
EXAMPLE = "notebook/tests.py"
FILES = [name for name in BLOCKS if name != EXAMPLE]


def test_every_file_of_the_app_is_printed() -> None:
    files = {f"notebook/{path.name}" for path in APP.glob("*.py") if path.name != "__init__.py"}
    assert files == set(FILES)


@for_each("name", FILES)
def test_the_page_prints_the_file_that_the_tests_use(name: str) -> None:
    text = (APP / name.removeprefix("notebook/")).read_text()
    assert BLOCKS[name] == text.replace(tests.adapters.third_party.__name__, "notebook")


@pytest.mark.thorough
@pytest.mark.django_db(transaction=False)
def test_the_example_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "notebook", tests.adapters.third_party)
    monkeypatch.setitem(sys.modules, "notebook.notebook", tests.adapters.third_party.notebook)
    before = list(Session.objects.filter(agent_type="notebook").order_by("pk"))
    namespace: dict[str, object] = {}
    exec(compile(BLOCKS[EXAMPLE], str(PAGE), "exec"), namespace)  # noqa: S102  our own documentation
    assert list(Session.objects.filter(agent_type="notebook").order_by("pk")) == before
    assert "notebook" in namespace
