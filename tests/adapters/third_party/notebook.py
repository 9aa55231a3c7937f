import hashlib
from datetime import UTC, datetime
from typing import Any

from helix_store.adapters import Database, LockedSession, SessionAdapter, session_id_for
from helix_store.core.payloads import decode, encode
from tests.adapters.third_party.models import Attachment, Page


class Notebook:
    """The notebook of a framework's project and conversation, in a session of helix_store."""

    def __init__(
        self, project: str, conversation: str, using: str | None = None, *, tenant: str = ""
    ) -> None:
        self.session_id = session_id_for(project, conversation)
        self._adapter = SessionAdapter("notebook", using, tenant=tenant)

    def write(self, name: str, content: Any, attachment: bytes | None = None) -> None:
        """Write a page, over an older one of its name, in one transaction with its attachment."""
        values = {
            "content": encode(content, limit=1_000_000, path="content"),
            "attachment": None if attachment is None else hashlib.sha256(attachment).hexdigest(),
        }

        def store(session: LockedSession) -> None:
            if attachment is not None:
                # Lock the row, so that a concurrent deletion cannot delete it.
                Attachment.objects.using(session.alias).select_for_update().get_or_create(
                    tenant=session.tenant, digest=values["attachment"], defaults={"content": attachment}
                )
            Page.objects.using(session.alias).update_or_create(
                session_id=session.key, name=name, defaults={**values, "written_at": datetime.now(UTC)}
            )

        self._adapter.write(self.session_id, store)

    def read(self, name: str) -> Any:
        """The content of a page, or ``None``."""

        def content(db: Database) -> str | None:
            pages = Page.objects.using(db.alias).filter(
                session__tenant=db.tenant, session__session_id=self.session_id, name=name
            )
            return pages.values_list("content", flat=True).first()

        text = self._adapter.read(content)
        return None if text is None else decode(text)

    def delete(self) -> int:
        return self._adapter.delete(self.session_id, Page)
