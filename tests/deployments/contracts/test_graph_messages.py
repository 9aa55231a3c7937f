"""The tests of `tests/checkpointers/test_graph_messages.py`."""

from tests.checkpointers.test_graph_messages import *  # noqa: F403  its tests and its fixtures
