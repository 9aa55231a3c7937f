"""Pages of streams."""

from __future__ import annotations

import copy
import pickle

from helix_store.core.streams import StoredChunk
from helix_store.core.types import StreamStatus
from helix_store.streams.chunks import StreamHead, StreamSlice

HEAD = StreamHead((1, 0), StreamStatus.ACTIVE, 9, 0)


def test_chunks_are_what_their_constructor_makes() -> None:
    chunks = StreamSlice(HEAD, 7, ['{"n":1}', '{"n":[2.0,"\\ud800"]}', '{"n":null}']).chunks()
    expected = [StoredChunk({"n": 1}, 7), StoredChunk({"n": [2.0, "\ud800"]}, 8), StoredChunk({"n": None}, 9)]
    assert chunks == expected
    assert [chunk.to_dict() for chunk in chunks] == [chunk.to_dict() for chunk in expected]
    assert list(map(repr, chunks)) == list(map(repr, expected))
    assert copy.deepcopy(chunks) == pickle.loads(pickle.dumps(chunks)) == expected  # noqa: S301  our own


def test_an_empty_page_has_no_chunks() -> None:
    assert StreamSlice(HEAD, 1, []).chunks() == []
