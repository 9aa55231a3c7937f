"""The tests of `tests/checkpointers/test_graph_checkpoints.py`."""

from tests.checkpointers.test_graph_checkpoints import *  # noqa: F403  its tests and its fixtures
