"""Which tests a run collects: those of its tier, and of suites that repeat others a sample.

Without arguments pytest runs the quick tier. ``--all`` runs everything, ``--rest`` what the quick tier leaves
out, and a run that names files or tests runs all of what it names.

A contract suite runs in full once on each back end; what is above the back ends runs on one database. A
variant of a back end (in the caller's transaction, behind a pooler) runs the tests in which it differs, and
a sample of the others. The sample changes with every run. The header prints its seed; ``--seed`` repeats it,
and ``--unsampled`` runs the variants in full.
``--shuffle`` changes the order of the tests, by the same seed. The quick tier generates 25 examples where the
others generate 100.
"""

from __future__ import annotations

import inspect
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import settings

from tests.databases import ALIASES
from tests.tiers import (
    LEFT_OUT,
    LONGEST,
    ON_ONE_DATABASE,
    Tier,
    is_below,
    is_left_out,
)

__all__ = [
    "Variant",
    "is_in_sample",
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_configure_node",
    "pytest_generate_tests",
    "pytest_ignore_collect",
    "pytest_pycollect_makeitem",
    "pytest_terminal_summary",
    "refuses_a_write",
    "selection_header",
]

_ROOT: Final = Path(__file__).resolve().parents[1]
_SUITES: Final = "helix_store.testing"
_PREFERRED: Final = "postgres" if "postgres" in ALIASES else next(iter(ALIASES))
_DATABASE_FIXTURES: Final = ("alias", "pair_of_aliases")
"""Fixtures whose parameters are the databases."""


@dataclass(frozen=True)
class Variant:
    """What a variant of a contract suite runs, besides one in ``one_in`` of the other tests."""

    differs_in: tuple[type, ...] = ()
    """Parts of the suite."""
    differs_where: Callable[[frozenset[str]], bool] = lambda names: False
    """Tests of other parts, by the names that their code uses."""
    one_in: int = 20
    never: str = ""
    """A name: tests that use it show nothing here."""

    def has(self, part: type, test: Callable[..., Any]) -> bool | None:
        """Return whether a test runs always, never or (``None``) as part of the sample."""
        names = frozenset(inspect.unwrap(test).__code__.co_names)
        if self.never in names:
            return False
        return part in self.differs_in or self.differs_where(names) or None


def refuses_a_write(names: frozenset[str]) -> bool:
    """Whether storage refuses something in a test that uses these names."""
    return "raises" in names and "storage_untouched" not in names


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("helix_store", "selection of tests")
    for tier, text in (
        (Tier.QUICK, "run the quick tier of what is named"),
        (Tier.REST, "run what the quick tier leaves out"),
        (Tier.ALL, "run everything"),
    ):
        group.addoption(f"--{tier}", dest="tier", action="store_const", const=str(tier), help=text)
    group.addoption("--seed", type=int, help="the seed of the samples, to repeat a run")
    group.addoption(
        "--shuffle", action="store_true", help="run modules, and the tests in them, in random order"
    )
    group.addoption("--unsampled", action="store_true", help="run variants in full instead of a sample")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.tier is None:
        names_tests = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
        config.option.tier = str(Tier.ALL if names_tests else Tier.QUICK)
    if config.option.tier == Tier.QUICK:
        settings.register_profile("quick", settings.get_profile("shared machine"), max_examples=25)
        settings.load_profile("quick")
    if config.option.seed is None:
        config.option.seed = random.SystemRandom().randrange(10_000)
    config.option.seed = getattr(config, "workerinput", {}).get("seed", config.option.seed)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give the workers of pytest-xdist one seed, so that all of them collect the same tests."""
    node.workerinput["seed"] = node.config.option.seed


def selection_header(config: pytest.Config) -> str:
    samples = "variants in full" if config.option.unsampled else "a sample of the variants"
    order = ", in random order" if config.option.shuffle else ""
    return f"tier: {config.option.tier}, {samples}{order}, --seed {config.option.seed}"


def is_in_sample(config: pytest.Config, name: str, one_in: int) -> bool:
    """Return whether this run's sample has a test: every name has the same chance in every run."""
    return config.option.unsampled or zlib.crc32(f"{config.option.seed} {name}".encode()) % one_in == 0


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    tier, path = Tier(config.option.tier), _from_root(collection_path)
    if tier is Tier.QUICK and is_left_out(path):
        return True
    if tier is Tier.REST and path.endswith(".py") and not _has_rest(path):
        text = collection_path.read_text()
        return ("mark.thorough" not in text and "long_tests" not in text) or None
    return None


def pytest_pycollect_makeitem(
    collector: pytest.Module | pytest.Class, name: str, obj: object
) -> list[pytest.Item] | None:
    """Return an empty list for a test that this run leaves out."""
    if not name.startswith("test_") or not callable(obj):
        return None
    return None if _is_of_tier(collector, obj) and _is_chosen(collector, name) else []


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test on one database where a second one would show nothing more."""
    fixture = next((name for name in _DATABASE_FIXTURES if name in metafunc.fixturenames), None)
    if fixture is None or any(
        mark.args[0] == fixture for mark in metafunc.definition.iter_markers("parametrize")
    ):
        return
    part = metafunc.cls and _part_with(metafunc.cls, metafunc.function.__name__)
    is_quick = metafunc.config.option.tier == Tier.QUICK
    is_variant = hasattr(metafunc.cls, "variant") and part.__module__.startswith(_SUITES)
    if (
        part in getattr(metafunc.cls, "same_on_each_database", ())
        or is_variant
        or (is_quick and is_below(_from_root(Path(metafunc.module.__file__ or "")), ON_ONE_DATABASE))
        or (is_quick and _is_long(metafunc.cls, metafunc.function.__name__))
    ):
        # A marker replaces the parameters of a fixture.
        chosen = pytest.mark.parametrize(fixture, [_PREFERRED], indirect=True)
        metafunc.definition.add_marker(chosen, append=False)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    if config.option.tier == Tier.REST:
        items[:] = [item for item in items if _is_rest(config, item)]
    if config.option.shuffle:
        # Before pytest brings together what shares a fixture: a filled database is not made for every test.
        order = random.Random(config.option.seed)  # noqa: S311
        places = {path: order.random() for path in dict.fromkeys(item.path for item in items)}
        items.sort(key=lambda item: (places[item.path], order.random()))
    if config.option.tier != Tier.QUICK:
        items.sort(key=lambda item: _from_root(item.path) not in LONGEST)
    yield
    if config.option.tier == Tier.QUICK and not config.option.shuffle:
        # While one worker migrates the databases, the others run what needs none.
        items.sort(key=_uses_databases)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.option.tier == Tier.QUICK:
        terminalreporter.section("not in this run")
        for line in (
            "; ".join(dict.fromkeys(LEFT_OUT.values())),
            f"on SQLite: {', '.join(ON_ONE_DATABASE)}",
            "stores in the caller's transaction, without fast paths and without notifications",
            "python -m pytest -n logical --rest runs all this, --all runs everything (tests/README.md)",
        ):
            terminalreporter.write_line(line)


def _uses_databases(item: pytest.Item) -> bool:
    return (
        "django_db_setup" in getattr(item, "fixturenames", ())
        or item.get_closest_marker("django_db") is not None
    )


def _from_root(path: Path) -> str:
    return path.relative_to(_ROOT).as_posix() if path.is_relative_to(_ROOT) else path.as_posix()


def _has_rest(path: str) -> bool:
    return is_left_out(path) or is_below(path, ON_ONE_DATABASE)


def _is_thorough(obj: object) -> bool:
    marks = getattr(obj, "pytestmark", [])
    return any(mark.name == "thorough" for mark in (marks if isinstance(marks, list) else [marks]))


def _is_long(cls: type | None, name: str) -> bool:
    """Return whether the quick tier runs a test of a contract suite on one database only."""
    return name in getattr(cls, "long_tests", ())


def _is_of_tier(collector: pytest.Module | pytest.Class, obj: Callable[..., Any]) -> bool:
    tier, path = Tier(collector.config.option.tier), _from_root(collector.path)
    if tier is Tier.ALL or (tier is Tier.REST and _has_rest(path)):
        return True
    if tier is Tier.REST and isinstance(collector.obj, type) and _is_long(collector.obj, obj.__name__):
        return True
    module = collector.getparent(pytest.Module)
    is_thorough = any(_is_thorough(each) for each in (obj, collector.obj, module and module.obj))
    return is_thorough is (tier is Tier.REST)


def _part_with(cls: type, name: str) -> type:
    """The class of a suite in which a test is written."""
    return next(each for each in cls.__mro__ if name in vars(each))


def _is_chosen(collector: pytest.Module | pytest.Class, name: str) -> bool:
    cls = collector.obj
    if not isinstance(cls, type):
        return True
    part = _part_with(cls, name)
    if part in getattr(cls, "only_on_databases", ()):
        return False
    variant: Variant | None = getattr(cls, "variant", None)
    if variant is None or not part.__module__.startswith(_SUITES):
        return True
    chosen = variant.has(part, vars(part)[name])
    if chosen is None:
        return is_in_sample(collector.config, f"{collector.nodeid}::{name}", variant.one_in)
    return chosen


def _is_rest(config: pytest.Config, item: pytest.Item) -> bool:
    path = _from_root(item.path)
    values: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    chosen = next((values[name] for name in _DATABASE_FIXTURES if name in values), _PREFERRED)
    is_on_one = is_below(path, ON_ONE_DATABASE) or _is_long(
        getattr(item, "cls", None), getattr(item, "originalname", "")
    )
    if not is_on_one or is_left_out(path) or chosen != _PREFERRED:
        return True
    # The quick tier runs this on the preferred database, unless it is marked.
    return isinstance(item, pytest.Function) and any(
        _is_thorough(each) for each in (item.obj, item.cls, item.module)
    )
