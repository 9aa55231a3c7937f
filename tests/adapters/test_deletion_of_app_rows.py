"""Rows of another app go with their sessions and tenants, on every way by which these go."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from django.db import transaction
from django.db.models import Model

from helix_store.cleanup import erase, expired_session_cleanup
from helix_store.core.types import SESSION_EXPIRED, RetentionPolicy
from helix_store.models import Session
from helix_store.retention import apply_retention
from helix_store.stores import DatabaseLockManager, DatabaseStateStore
from tests.adapters.conftest import MakeNotebook, fill
from tests.adapters.third_party.models import Attachment, Page
from tests.adapters.third_party.notebook import Notebook
from tests.cells import for_each
from tests.cleanup.canaries import dumps
from tests.database.separate import beside
from tests.databases import CommittedDatabase, delete_all_rows

LONG_AGO = timedelta(days=4_000)


def _number(database: CommittedDatabase, model: type[Model]) -> int:
    return model._base_manager.using(database.alias).count()


def _by_store(database: CommittedDatabase, notebook: Notebook) -> None:
    store = DatabaseStateStore(database.alias, tenant=database.tenant)
    assert store.delete_session(notebook.session_id, keep_usage=True) == 1


def _by_adapter(database: CommittedDatabase, notebook: Notebook) -> None:
    assert notebook.delete() == 1


def _by_erasure(database: CommittedDatabase, notebook: Notebook) -> None:
    foreseen = erase(using=database.alias, session_id=notebook.session_id, dry_run=True)
    receipt = erase(using=database.alias, session_id=notebook.session_id)
    assert receipt.complete
    assert receipt.deleted["notebook_page"] == 2
    assert receipt.deleted["notebook_attachment"] == 1
    assert receipt.deleted == foreseen.deleted


def _age(database: CommittedDatabase, notebook: Notebook) -> None:
    sessions = Session.objects.using(database.alias).filter(session_id=notebook.session_id)
    session = sessions.get()
    sessions.update(
        status="failed",
        failure_reason=SESSION_EXPIRED,
        expires_at=session.created_at - LONG_AGO,
        updated_at=session.created_at - LONG_AGO,
    )


def _by_cleanup(database: CommittedDatabase, notebook: Notebook) -> None:
    _age(database, notebook)
    assert expired_session_cleanup(using=database.alias, delete_after=timedelta(days=1)).deleted == 1


def _by_retention(database: CommittedDatabase, notebook: Notebook) -> None:
    _age(database, notebook)
    policy = RetentionPolicy(sessions_idle_days={"failed": 1})
    assert apply_retention(using=database.alias, policy=policy).trees == 1


@pytest.mark.thorough
@for_each("way", [_by_store, _by_adapter, _by_erasure, _by_cleanup, _by_retention])
def test_a_session_takes_its_pages_and_what_no_other_shares(
    committed_db: CommittedDatabase,
    notebook: MakeNotebook,
    way: Callable[[CommittedDatabase, Notebook], None],
) -> None:
    delete_all_rows(committed_db.alias)
    doomed, other = notebook("doomed"), notebook("other")
    doomed.write("own", 1, b"of it alone")
    doomed.write("page", 1, b"of both")
    other.write("page", 1, b"of both")
    way(committed_db, doomed)
    (page,) = Page.objects.using(committed_db.alias).all()
    assert page.session.session_id == other.session_id
    assert [bytes(row.content) for row in Attachment.objects.using(committed_db.alias)] == [b"of both"]
    assert other.delete() == 1
    assert (_number(committed_db, Page), _number(committed_db, Attachment)) == (0, 0)


@pytest.mark.parametrize("is_deleted_first", [False, True])
def test_a_page_that_is_written_beside_a_deletion_has_its_attachment(
    postgres_db: CommittedDatabase, is_deleted_first: bool
) -> None:
    names = ("doomed", "other")
    doomed, other = (
        Notebook("project", name, postgres_db.alias, tenant=postgres_db.tenant) for name in names
    )
    doomed.write("page", 1, b"of both")
    calls: list[Callable[[], object]] = [lambda: other.write("page", 1, b"of both"), doomed.delete]
    first, second = reversed(calls) if is_deleted_first else calls
    with transaction.atomic(using=postgres_db.alias):
        first()
        outcome = beside(postgres_db, second)
    outcome.result(30)
    attachments = Attachment.objects.using(postgres_db.alias).filter(tenant=postgres_db.tenant)
    assert [bytes(row.content) for row in attachments] == [b"of both"]


def test_the_pages_in_a_session_of_the_application_go_alone(
    committed_db: CommittedDatabase, notebook: MakeNotebook
) -> None:
    book = notebook("shared")
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    store.create_session(book.session_id, agent_type="application")
    fill(book)
    assert book.delete() == 2
    assert store.load_state(book.session_id) is not None
    pages = Page.objects.using(committed_db.alias).filter(session__tenant=committed_db.tenant)
    attachments = Attachment.objects.using(committed_db.alias).filter(tenant=committed_db.tenant)
    assert not pages.exists()
    assert not attachments.exists()


def test_an_erased_tenant_leaves_no_row_and_no_text(
    committed_db: CommittedDatabase, notebook: MakeNotebook
) -> None:
    delete_all_rows(committed_db.alias)
    notebook("one").write("canary", "canary", b"canary")
    Attachment.objects.using(committed_db.alias).create(
        tenant=committed_db.tenant, digest="canary", content=b"canary"
    )
    other = Attachment.objects.using(committed_db.alias).create(
        tenant=f"{committed_db.tenant} other", digest="of no page", content=b"kept"
    )
    foreseen = erase(using=committed_db.alias, tenant=committed_db.tenant, dry_run=True)
    assert foreseen.deleted["notebook_attachment"] == 2
    receipt = erase(using=committed_db.alias, tenant=committed_db.tenant)
    assert receipt.complete
    assert receipt.deleted == foreseen.deleted
    assert _number(committed_db, Page) == 0
    assert list(Attachment.objects.using(committed_db.alias)) == [other]
    for way, data in dumps(committed_db.alias):
        assert b"canary" not in data, way


def test_a_session_in_use_keeps_what_its_tenant_shares(
    committed_db: CommittedDatabase, notebook: MakeNotebook
) -> None:
    used = notebook("used")
    fill(used)
    lock = DatabaseLockManager(committed_db.alias, tenant=committed_db.tenant).acquire(used.session_id)
    assert lock is not None
    receipt = erase(using=committed_db.alias, tenant=committed_db.tenant)
    assert not receipt.complete
    assert "notebook_attachment" not in receipt.deleted
    assert used.read("ant") == [1, None]
    lock.release()
    assert erase(using=committed_db.alias, tenant=committed_db.tenant).complete
    assert not Attachment.objects.using(committed_db.alias).filter(tenant=committed_db.tenant).exists()
