"""The vectors of memories."""

from __future__ import annotations

from typing import Any

from django.db import models
from django.utils.translation import gettext_lazy as _

from helix_store.conf import table_name
from helix_store.core.limits import MAX_ID_BYTES, MAX_NAMESPACE_BYTES
from helix_store.models.constraints import unique
from helix_store.models.fields import IdentifierField, LongIdentifierField, MomentField


class VectorField(models.TextField):  # type: ignore[type-arg]  # not subscriptable at run time
    """A vector of any number of dimensions, as the text ``[0.5,1]``. Only PostgreSQL can compare vectors."""

    def db_type(self, connection: Any) -> str | None:
        return "vector" if connection.vendor == "postgresql" else super().db_type(connection)


class LangGraphVector(models.Model):
    """The vector of a text in a memory. ``path`` is the place of the text in the value.

    It belongs to the version of the memory that was ``written_at`` this time: after a put that stores no
    vectors, the old vectors are ignored. The database deletes it with the memory.
    """

    tenant = IdentifierField(default="", blank=True)
    namespace = IdentifierField(max_length=MAX_NAMESPACE_BYTES)
    key = IdentifierField(max_length=MAX_ID_BYTES, blank=True)
    path = LongIdentifierField()
    written_at = MomentField()
    embedding = VectorField()

    class Meta:
        db_table = table_name("lg_vector")
        verbose_name = _("LangGraph vector")
        verbose_name_plural = _("LangGraph vectors")
        constraints = [
            unique("lg_vector_uniq", ["tenant", "namespace", "key", "path"]),
        ]

    def __str__(self) -> str:
        return f"{self.namespace}{self.key} {self.path}"
