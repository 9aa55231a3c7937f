"""The tests of `tests/checkpointers/test_snapshots.py`."""

from tests.checkpointers.test_snapshots import *  # noqa: F403  its tests and its fixtures
