"""The tests of `tests/checkpointers/test_concurrent_writers.py`."""

from tests.checkpointers.test_concurrent_writers import *  # noqa: F403  its tests and its fixtures
