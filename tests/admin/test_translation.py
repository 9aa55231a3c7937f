"""The German pages: every text of the code and the templates is translated, and is what the pages show."""

from __future__ import annotations

import ast
import gettext
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import django
import pytest
from django.contrib import admin
from django.test.utils import override_settings
from django.urls import reverse
from django.utils.translation.template import templatize

import helix_store
from helix_store.checkpointers import GraphCheckpointStore, SnapshotCheckpointer
from helix_store.models import Checkpoint, Lock, Session, Stream
from helix_store.stores import DatabaseUsageStore
from tests.admin.conftest import Browser, Page
from tests.admin.labels import labels_of
from tests.admin.rows import MODELS, rows_of, store_of, write_session
from tests.security.admin_requests import address_of

PACKAGE = Path(helix_store.__file__).parent
CATALOG = PACKAGE / "locale/de/LC_MESSAGES"
MARKS = {"_", "gettext", "gettext_lazy", "ngettext", "ngettext_lazy", "pgettext", "pgettext_lazy"}


def _texts(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in MARKS:
            given = node.args[:2] if node.func.id.startswith("pgettext") else node.args[:1]
            if all(isinstance(each, ast.Constant) and isinstance(each.value, str) for each in given):
                # A catalog has a text with a context under both.
                yield "\x04".join(each.value for each in given)  # type: ignore[attr-defined]  # see above


def _marked_texts() -> set[str]:
    """What the code and the templates mark for translation."""
    found: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        found.update(_texts(ast.parse(path.read_text())))
    for path in PACKAGE.rglob("*.html"):
        for call in re.findall(r"\b[np]?gettext\(.*?\)(?= |$)", templatize(path.read_text()), re.MULTILINE):
            found.update(_texts(ast.parse(call.replace("ngettext(", "ngettext(", 1), mode="exec")))
    return found


def _german(path: Path) -> dict[Any, str]:
    """Return the translations of a catalog; the key of a plural is a tuple."""
    with path.open("rb") as file:
        return dict(gettext.GNUTranslations(file)._catalog)  # type: ignore[attr-defined]


@pytest.mark.thorough
def test_every_marked_text_has_a_german_one() -> None:
    known = {key if isinstance(key, str) else key[0] for key in _german(CATALOG / "django.mo")}
    marked = _marked_texts()
    assert {
        "Needs somebody",
        "%(count)d minute ago",
        "Charts and CSV",
        "Daily figures",
        "of a turn\x04Run",
    } <= marked
    assert sorted(marked - known) == []


TEXTS_OF_DJANGO_6_1: Final = {"Failed", "Run", "Select an action"}
"""Texts that have no German translation there."""


def test_no_text_changes_the_pages_of_django() -> None:
    """Catalogs share one namespace: the button "Run" of Django 6.1 was called "Lauf" in every app's admin."""
    django_apps = Path(django.__file__).parent / "contrib"
    texts, of_django = set(TEXTS_OF_DJANGO_6_1), dict[Any, str]()
    for path in django_apps.glob("*/locale"):
        texts.update(re.findall(r'(?m)^msgid "(.+)"$', (path / "en/LC_MESSAGES/django.po").read_text()))
        of_django |= _german(path / "de/LC_MESSAGES/django.mo")
    ours = _german(CATALOG / "django.mo")
    assert len(texts & ours.keys()) > 5
    wrong = {text: ours[text] for text in texts & ours.keys() if ours[text] != of_django.get(text, text)}
    assert wrong == {}


def test_the_source_of_the_catalog_has_no_empty_or_doubtful_text() -> None:
    entries = (CATALOG / "django.po").read_text().split("\n\n")[1:]
    assert len(entries) > 300
    assert [entry for entry in entries if re.search(r'^msgstr(\[\d\])? ""$', entry, re.MULTILINE)] == []
    assert [entry for entry in entries if "fuzzy" in entry] == []


def test_the_placeholders_of_a_translation_are_those_of_the_text() -> None:
    placeholder = re.compile(r"%\(\w+\)[sd]|%[sd]|\{\w*\}")
    for entry in (CATALOG / "django.po").read_text().split("\n\n")[1:]:
        sources = re.findall(r'^msgid(?:_plural)? "(.*)"$', entry, re.MULTILINE)
        expected = [sorted(placeholder.findall(source)) for source in sources]
        for translated in re.findall(r'^msgstr(?:\[\d\])? "(.*)"$', entry, re.MULTILINE):
            assert sorted(placeholder.findall(translated)) in expected, entry


@pytest.mark.thorough
def test_the_pages_are_german_in_a_german_project(browser: Browser) -> None:
    session = write_session(browser.database, "x")
    store_of(browser.database).create_session("late", agent_type="a", expires_at=0)
    with override_settings(LANGUAGE_CODE="de"):
        listed = browser.list_of(Session).text
        started = browser.open(reverse("admin:app_list", args=["helix_store"])).text
        others = [browser.list_of(model) for model in MODELS] + [
            browser.page_of(row) for row in rows_of(session)
        ]
        report = browser.open(reverse("admin:helix_store_usageentry_report")).text
    for words in ("Nachrichten, Schritte", "Kosten, Token", "Sekunde", "abgelaufen vor", "Jahren"):
        assert words in listed
    assert "Zu erledigen" in started
    assert "Agentensitzungen" in started
    assert "Nach Agententyp" in report
    assert [page.status for page in others] == [200] * len(others)


SAME: Final = {
    *(
        "Agent",
        "Audio",
        "Budget",
        "Budgets",
        "Bytes",
        "Checkpoint",
        "Checkpoints",
        "Details",
        "Filter",
        "Name",
        "Prompt",
        "Snapshot",
        "Snapshots",
    ),
    *("Status", "Stream", "Streams", "Token", "Version"),
    "Pages",  # of the app of a third party that the tests install
    # Django's own button, which its catalog does not translate.
    *({"Run"} if django.VERSION >= (6, 1) else ()),
}
"""Words that are the same in both languages."""


def _every_page(browser: Browser) -> dict[str, Page]:
    """The pages of all models, the sections of a session, and a form of each operation."""
    session = Session.objects.using(browser.database.alias).get(session_id="0123")
    pages = {f"list {model.__name__}": browser.list_of(model) for model in MODELS}
    pages |= {f"section {name}": page for name, page in browser.sections_of(session).items()}
    for row in rows_of(session):
        pages[f"page {row._meta.model_name}"] = browser.page_of(row)
        pages[f"history {row._meta.model_name}"] = browser.open(address_of(row, "history", row.pk))
    for snapshot in Checkpoint.objects.using(browser.database.alias).filter(kind="snapshot"):
        pages["page snapshot"] = browser.page_of(snapshot)
    for model in (Session, Lock, Stream):
        page: Any = admin.site.get_model_admin(model)
        (row,) = [row for row in rows_of(session) if type(row) is model]
        for operation in page.row_operations:
            address = address_of(model, "operation", row.pk, operation.name)
            pages[f"operation {operation.name}"] = browser.open(address)
        for operation in page.table_operations:
            address = address_of(model, "table_operation", operation.name)
            pages[f"operation {operation.name}"] = browser.open(address)
    for name in ("session_graphs", "session_snapshots", "usageentry_report"):
        pages[name] = browser.open(reverse(f"admin:helix_store_{name}"))
    pages["start"] = browser.open(reverse("admin:app_list", args=["helix_store"]))
    return pages


@pytest.mark.thorough
def test_no_label_of_any_page_is_english_in_a_german_project(browser: Browser) -> None:
    # Data without letters, so that all words are labels.
    write_session(browser.database, "0123", session_id="0123")
    GraphCheckpointStore(browser.database.alias, tenant=browser.database.tenant).create_session("/")
    SnapshotCheckpointer(browser.database.alias, tenant=browser.database.tenant).put("456", {"version": 1})
    english = _every_page(browser)
    with override_settings(LANGUAGE_CODE="de"):
        german = _every_page(browser)
    assert {name: page.status for name, page in german.items()} == dict.fromkeys(english, 200)
    labels = {name: labels_of(page.html) for name, page in english.items()}
    assert all(len(found) > 5 for found in labels.values()), labels
    untranslated = {
        name: sorted(found)
        for name, page in german.items()
        if (found := labels[name] & labels_of(page.html) - SAME)
    }
    assert untranslated == {}


@pytest.mark.skipif(sys.platform == "win32", reason="the build runs in a shell")
def test_the_wheel_contains_the_catalog(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=PACKAGE.parent, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for name in ("locale/de/LC_MESSAGES/django.mo", "static/helix_store/lists.css"):
        assert f"helix_store/{name}" in names


def test_numbers_have_the_separators_of_the_language(browser: Browser) -> None:
    store = store_of(browser.database)
    store.create_session("s", agent_type="a")
    entry = {"kind": "tokens", "session_id": "s", "step_count": 1, "timestamp": 1_772_400_000_000}
    source = {"source": {"type": "agent", "name": "a"}, "model": "m", "cost_usd": "1234.5"}
    usage = DatabaseUsageStore(browser.database.alias, tenant=browser.database.tenant)
    usage.record_entry({**entry, **source, "tokens": {"total": 1_234_567}})
    session = Session.objects.using(browser.database.alias).get(session_id="s")
    report = reverse("admin:helix_store_usageentry_report")
    period = {"since": "2026-03-01", "until": "2026-03-03"}
    for language, cost, tokens in (("en", "$1,234.50", "1,234,567"), ("de", "1.234,50 $", "1.234.567")):
        with override_settings(LANGUAGE_CODE=language):
            pages = [
                browser.list_of(Session),
                browser.page_of(session, section="usage"),
                browser.open(report, **period),
            ]
        for page in pages:
            assert cost in page.text
            assert tokens in page.text
