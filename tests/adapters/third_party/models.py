from django.db import models

from helix_store.models import Session
from helix_store.models.fields import IdentifierField, MomentField, PayloadField


class Page(models.Model):
    """A page of the notebook of a session."""

    session = models.ForeignKey(
        Session, on_delete=models.CASCADE, related_name="+", db_constraint=False, db_index=False
    )
    name = IdentifierField()
    content = PayloadField()
    attachment = IdentifierField(null=True)
    written_at = MomentField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["session", "name"], name="notebook_page_uniq")]

    def __str__(self) -> str:
        return str(self.name)


class Attachment(models.Model):
    """Bytes that pages of several sessions share, stored once for each tenant."""

    tenant = IdentifierField(default="", blank=True)
    digest = models.CharField(max_length=64)
    content = models.BinaryField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["tenant", "digest"], name="notebook_attachment_uniq")]

    def __str__(self) -> str:
        return str(self.digest)
