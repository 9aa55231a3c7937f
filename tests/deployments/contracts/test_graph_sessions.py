"""The tests of `tests/checkpointers/test_graph_sessions.py`."""

from tests.checkpointers import test_graph_sessions
from tests.checkpointers.test_graph_sessions import *  # noqa: F403  its tests and its fixtures


class TestSearch(test_graph_sessions.TestSearch):  # type: ignore[no-redef]  # in place of the imported one
    # It creates a database, and a pooler serves only those of its configuration.
    test_finds_other_letters_than_ascii_where_the_locale_knows_their_cases = None  # type: ignore[assignment]
