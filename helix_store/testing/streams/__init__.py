"""The contract suite of a stream manager: a class for each part, and `StreamManagerContract` for all."""

from helix_store.testing.streams.arguments import StreamArgumentContract
from helix_store.testing.streams.base import StreamTests
from helix_store.testing.streams.lives import StreamFencingContract, StreamLifeContract
from helix_store.testing.streams.pruning import StreamPruningContract
from helix_store.testing.streams.reading import ReadingContract
from helix_store.testing.streams.writing import WritingContract

__all__ = [
    "ReadingContract",
    "StreamArgumentContract",
    "StreamFencingContract",
    "StreamLifeContract",
    "StreamManagerContract",
    "StreamPruningContract",
    "StreamTests",
    "WritingContract",
]


class StreamManagerContract(
    WritingContract,
    ReadingContract,
    StreamLifeContract,
    StreamPruningContract,
    StreamFencingContract,
    StreamArgumentContract,
):
    """All tests of a stream manager."""
