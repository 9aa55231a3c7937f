"""Stories that are told beside each other, with the same names in every one of them."""

from __future__ import annotations

import random
from typing import Final

from tests.faults.writes import KEY, STORIES, Contents, Faces, write
from tests.faults.writes.rows import Rows

__all__ = ["live"]

_WRITES: Final = 12


def live(alias: str, tenant: str, seed: int) -> Contents:
    """Make some writes of a story, and return what the rows of the tenant say then."""
    chance = random.Random(seed)  # noqa: S311  the same writes for the same seed
    story = chance.choice([*STORIES.values()])
    faces = Faces.of_database(alias, tenant)
    rows = Rows(alias, tenant, story.tables)
    story.begin(faces, KEY)
    for kind in chance.choices([*story.kinds], k=_WRITES):
        write(story, faces, kind)
    return rows.contents(rows.read())
