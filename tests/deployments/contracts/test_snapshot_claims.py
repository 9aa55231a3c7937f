"""The tests of `tests/checkpointers/test_snapshot_claims.py`."""

from tests.checkpointers.test_snapshot_claims import *  # noqa: F403  its tests and its fixtures
