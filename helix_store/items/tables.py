"""The table of items, for the catalogue."""

from typing import Final

from helix_store.catalogue import Table, copied_by
from helix_store.items.sql import COPY_TO_BRANCH
from helix_store.models import Item

TABLES: Final = (
    Table(Item, record="item", order=("lane", "id"), branch=copied_by(COPY_TO_BRANCH), follows="message"),
)
