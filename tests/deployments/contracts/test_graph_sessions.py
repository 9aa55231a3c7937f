"""The tests of `tests/checkpointers/test_graph_sessions.py`."""

from tests.checkpointers.test_graph_sessions import *  # noqa: F403  its tests and its fixtures
