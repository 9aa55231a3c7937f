"""The default serializer, and the translation of all serializers' errors into errors of this store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from langgraph._internal import _serde
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from helix_store.contrib.langgraph.plain import PLAIN_TYPES
from helix_store.exceptions import IntegrityFault, InvalidPayload, shown_id

# Graphs pass the types of their schemas to a saver only if this is set. LangGraph itself sets it only if the
# variable LANGGRAPH_STRICT_MSGPACK was set when LangGraph was imported. No other saver becomes strict: a
# serializer that builds all objects ignores these types.
_serde.STRICT_MSGPACK_ENABLED = True  # type: ignore[attr-defined]  # it is imported there

T = TypeVar("T")


class StrictSerializer(JsonPlusSerializer):
    """LangGraph's serializer, limited to the types that it writes. It builds objects of plain types, of
    LangChain's messages, and of the types in the schema of the graph.

    LangGraph's serializer also reads ``json``, a type of older versions, and builds the langchain_core
    objects that such bytes name. This one does not.
    """

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        """Read a value. Raises `IntegrityFault` for another type."""
        if data[0] not in PLAIN_TYPES:
            raise IntegrityFault(f"the default serializer does not read the type {shown_id(data[0])}")
        return super().loads_typed(data)


def dumped(serde: SerializerProtocol, value: Any, path: str) -> tuple[str, bytes]:
    """Return the type and the bytes of a value. Raises `InvalidPayload` if the serializer refuses it."""
    try:
        kind, blob = serde.dumps_typed(value)
    except (TypeError, ValueError, RecursionError) as exc:
        reason = f"the serializer cannot write it ({type(exc).__name__})"
        raise InvalidPayload(path=path, reason=reason) from exc
    # LangGraph's serializer returns a bytearray unchanged.
    return kind, bytes(blob)


def read_from(thread_id: str, checkpoint_id: str, read: Callable[[], T]) -> T:
    """Read from the bytes of a checkpoint. If they cannot be read, raise an `IntegrityFault` that names it.
    Damaged bytes may raise any error, depending on where they are damaged. An `OSError` does not mean that
    the bytes are damaged: the serializer may have requested a key from a service.
    """
    try:
        return read()
    except (OSError, MemoryError):
        raise
    except Exception as exc:  # noqa: BLE001
        reason = str(exc) if isinstance(exc, IntegrityFault) else type(exc).__name__
    # Raised here, because a decoder's error may contain the whole value and would become the context.
    raise IntegrityFault(
        f"The LangGraph checkpoint {shown_id(checkpoint_id)} of the thread {shown_id(thread_id)} cannot be "
        f"read ({reason}); other checkpoints are not affected."
    )
