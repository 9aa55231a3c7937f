"""The back ends of a stream manager. They have the same operations, whose arguments are checked and whose
chunks are encoded before the call. Every write is atomic and raises `StreamNotFound` for an unknown stream; a
guard is checked before anything is written.
"""

from helix_store.streams.database import DatabaseStreams
from helix_store.streams.memory import MemoryStreams

StreamBackend = DatabaseStreams | MemoryStreams
