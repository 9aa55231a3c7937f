"""Items: ordered rows in the lanes of a session, which agent frameworks keep in addition to messages."""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from helix_store.conf import table_name
from helix_store.core.limits import MAX_LANE_BYTES
from helix_store.models.constraints import index, unique
from helix_store.models.fields import IdentifierField, MomentField, PayloadField
from helix_store.models.sessions import session_key


class Item(models.Model):
    """An item. The order of keys is that of the lane: keys are assigned under the lock of the session.

    ``session_version`` is the version of the session when the item was added: a checkpoint has a greater
    version than every item that was committed before it. Items that a branch copies have version 0.
    """

    # The index on the lane begins with the session, and the lock on the session's row protects the reference.
    session = session_key("items")
    lane = IdentifierField(max_length=MAX_LANE_BYTES, default="", blank=True)
    key = IdentifierField(max_length=MAX_LANE_BYTES, null=True, blank=True)
    payload = PayloadField()
    created_at = MomentField()
    # It is null in rows that earlier releases or other stores have written.
    session_version = models.BigIntegerField(null=True, blank=True, editable=False)

    class Meta:
        db_table = table_name("item")
        verbose_name = _("item")
        verbose_name_plural = _("items")
        constraints = [
            unique("item_key_uniq", ["session", "lane", "key"], where=Q(key__isnull=False)),
        ]
        indexes = [
            index("item_lane_idx", ["session", "lane", "id"]),
        ]

    def __str__(self) -> str:
        return str(self.pk)
