"""Every kind of write, told as stories."""

from tests.faults.writes.faces import Faces
from tests.faults.writes.stories import KEY, STORIES, Contents, Story, write

__all__ = ["KEY", "STORIES", "Contents", "Faces", "Story", "write"]
