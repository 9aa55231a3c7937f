"""The back ends of a stream manager. They have the same operations, whose arguments have been checked and
whose chunks have been encoded. Every write is atomic and raises `StreamNotFound` for an unknown stream; a
guard is checked before anything is written.
"""

from helix_store.streams.database import DatabaseStreams
from helix_store.streams.memory import MemoryStreams

StreamBackend = DatabaseStreams | MemoryStreams
