from collections.abc import Collection

from django.db.models import Count, Max, Model

from helix_store.adapters import ConversationMessage, ConversationPage, Database, Outline, Part
from helix_store.core.payloads import decode
from tests.adapters.third_party.models import Page


class NotebookConversation:
    """The pages of a notebook as messages."""

    name = "Notebook"
    needs: tuple[type[Model], ...] = (Page,)

    def outlines(self, db: Database, keys: Collection[int]) -> dict[int, Outline]:
        pages = Page.objects.using(db.alias).filter(session_id__in=keys)
        found = list(pages.values("session_id").annotate(count=Count("pk"), newest=Max("pk")))
        newest = Page.objects.using(db.alias).in_bulk([each["newest"] for each in found])
        return {
            each["session_id"]: Outline(
                count=each["count"], last=message_of(each["count"], newest[each["newest"]])
            )
            for each in found
        }

    def page(
        self, db: Database, key: int, *, first: int | None, limit: int, thread: str | None = None
    ) -> ConversationPage | None:
        pages = Page.objects.using(db.alias).filter(session_id=key)
        total = pages.count()
        if not total:
            return None
        start = max(1, total - limit + 1) if first is None else first
        rows = pages.order_by("pk")[start - 1 : start - 1 + limit]
        messages = (message_of(number, page) for number, page in enumerate(rows, start))
        return ConversationPage(messages=tuple(messages), total=total)


def message_of(number: int, page: Page) -> ConversationMessage:
    parts = [Part(kind="text", text=f"{page.name}: {decode(page.content)}")]
    if page.attachment is not None:
        parts.append(Part(kind="file", name="attachment", text=page.attachment))
    return ConversationMessage(
        number=number, role="assistant", parts=parts, at=page.written_at, row=(Page, page.pk)
    )
