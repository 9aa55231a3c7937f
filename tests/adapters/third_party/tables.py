from collections.abc import Collection, Iterator

from django.db.models import Exists, Model, OuterRef, QuerySet

from helix_store.adapters import AppTable, Database, copy_rows, register_table
from helix_store.models import Session
from tests.adapters.third_party.models import Attachment, Page


def register() -> None:
    register_table(
        AppTable(
            Page,
            record="notebook_page",
            order=("name",),
            branch=copy_rows,
            before_delete=drop_attachments,
            check=missing_attachments,
        )
    )
    register_table(
        AppTable(
            Attachment,
            record="notebook_attachment",
            order=("digest",),
            parent="tenant",
            of_sessions=attachments_of,
        )
    )


def drop_attachments(db: Database, keys: Collection[int]) -> dict[type[Model], int]:
    """Delete the attachments that only pages of these sessions have."""
    # Lock them in a statement of its own first, so that the deletion sees the pages written until then.
    list(attachments_of_these(db, keys).select_for_update().order_by("digest").values_list("pk"))
    deleted, _ = attachments_of_these_alone(db, keys).delete()
    return {Attachment: deleted}


def attachments_of_these(db: Database, keys: Collection[int]) -> QuerySet[Attachment]:
    pages = Page.objects.using(db.alias).filter(session_id__in=keys).exclude(attachment=None)
    return Attachment.objects.using(db.alias).filter(tenant=db.tenant, digest__in=pages.values("attachment"))


def attachments_of_these_alone(db: Database, keys: Collection[int]) -> QuerySet[Attachment]:
    others = Page.objects.using(db.alias).filter(session__tenant=db.tenant, attachment=OuterRef("digest"))
    return attachments_of_these(db, keys).filter(~Exists(others.exclude(session_id__in=keys)))


def attachments_of(rows: QuerySet[Attachment], sessions: QuerySet[Session]) -> QuerySet[Attachment]:
    """The attachments that an export of some sessions needs."""
    pages = Page.objects.using(rows.db).filter(session__in=sessions, attachment=OuterRef("digest"))
    return rows.filter(Exists(pages.filter(session__tenant=OuterRef("tenant"))))


def missing_attachments(db: Database, keys: Collection[int]) -> Iterator[tuple[int, str]]:
    """Pages whose attachment is lost, for the doctor."""
    pages = Page.objects.using(db.alias).filter(session_id__in=keys).exclude(attachment=None)
    known = Attachment.objects.using(db.alias).filter(
        tenant=OuterRef("session__tenant"), digest=OuterRef("attachment")
    )
    for key, name in pages.filter(~Exists(known)).values_list("session_id", "name"):
        yield key, f"the attachment of page {name} is missing"
