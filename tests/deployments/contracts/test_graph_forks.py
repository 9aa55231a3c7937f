"""The tests of `tests/checkpointers/test_graph_forks.py`."""

from tests.checkpointers.test_graph_forks import *  # noqa: F403  its tests and its fixtures
