"""The index of `DjangoStore`: the texts of a value that get a vector, and their embedding."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from langgraph.store.base import IndexConfig, ensure_embeddings, get_text_at_path, tokenize_path

from helix_store.core import validation
from helix_store.core.limits import MAX_ID_BYTES
from helix_store.engine.database import Database
from helix_store.exceptions import InvalidPayload, NotSupportedOnBackend

_APP: Final = "helix_store.contrib.langgraph.vectors"
_KEYS: Final = frozenset({"dims", "embed", "fields", "distance_type", "ann_index_config"})
_DISTANCES: Final = frozenset({"cosine", "l2", "inner_product"})
_MOST_DIMENSIONS: Final = 16_000
"""pgvector cannot store longer vectors."""


class Embedded(NamedTuple):
    """Texts and queries with their vectors, as PostgreSQL reads them."""

    texts: Mapping[str, str] = {}
    queries: Mapping[str, str] = {}


class Index:
    """A checked ``PostgresIndexConfig`` of LangGraph.

    Raises `ImproperlyConfigured` if the app for vectors is not installed, `NotSupportedOnBackend` if the
    database is not PostgreSQL, and `InvalidPayload` for an invalid configuration.
    """

    def __init__(self, config: IndexConfig, db: Database) -> None:
        if not apps.is_installed(_APP):
            raise ImproperlyConfigured(
                f'DjangoStore(index=…) keeps its vectors in a table: add "{_APP}" to INSTALLED_APPS, and run '
                "manage.py migrate."
            )
        if not db.is_postgresql:
            raise NotSupportedOnBackend("DjangoStore(index=…) needs PostgreSQL with the extension vector.")
        for name in config.keys() - _KEYS:
            raise InvalidPayload(path=f"index/{name}", reason=f"expected one of {', '.join(sorted(_KEYS))}")
        given: Mapping[str, Any] = config
        self.dims = validation.whole_number(
            given.get("dims"), "index/dims", minimum=1, maximum=_MOST_DIMENSIONS
        )
        self.distance = given.get("distance_type", "cosine")
        if self.distance not in _DISTANCES:
            known = ", ".join(sorted(_DISTANCES))
            raise InvalidPayload(path="index/distance_type", reason=f"expected one of {known}")
        if given.get("embed") is None:
            raise InvalidPayload(path="index/embed", reason="expected embeddings, a function or a name")
        self._embeddings = ensure_embeddings(given["embed"])
        fields = given.get("fields") or ["$"]
        self._fields = _checked_paths([fields] if isinstance(fields, str) else fields, "index/fields")

    def texts_of(self, value: Mapping[str, Any], index: Any) -> dict[str, str]:
        """Return the texts of a value that get a vector, by path; ``index`` is that of the put."""
        if index is False:
            return {}
        texts = {}
        for path in self._fields if index is None else _checked_paths(index, "index"):
            found = get_text_at_path(value, path if path == "$" else tokenize_path(path))
            for number, text in enumerate(found):
                texts[path if len(found) == 1 else f"{path}.{number}"] = text
        return texts

    def embed(self, texts: Iterable[str], queries: Iterable[str]) -> Embedded:
        """Return the vectors of the texts and of the queries. A model may embed queries differently."""
        texts, queries = _distinct(texts), _distinct(queries)
        documents = self._embeddings.embed_documents(texts) if texts else []
        of_queries = [self._embeddings.embed_query(query) for query in queries]
        return Embedded(self._vectors(texts, documents), self._vectors(queries, of_queries))

    async def aembed(self, texts: Iterable[str], queries: Iterable[str]) -> Embedded:
        """Async version of `embed`."""
        texts, queries = _distinct(texts), _distinct(queries)
        documents = await self._embeddings.aembed_documents(texts) if texts else []
        of_queries = await asyncio.gather(*map(self._embeddings.aembed_query, queries))
        return Embedded(self._vectors(texts, documents), self._vectors(queries, of_queries))

    def score(self, distance: float) -> float:
        """Return the score on the same scale as LangGraph's store: a higher score means a nearer text."""
        return 1 - distance if self.distance == "cosine" else -distance

    def _vectors(self, texts: Sequence[str], vectors: Sequence[Sequence[float]]) -> dict[str, str]:
        if len(vectors) != len(texts):
            reason = f"it returned {len(vectors)} vectors for {len(texts)} texts"
            raise InvalidPayload(path="index/embed", reason=reason)
        return {text: self._text(vector) for text, vector in zip(texts, vectors, strict=True)}

    def _text(self, vector: Sequence[float]) -> str:
        numbers = [float(number) for number in vector]
        if len(numbers) != self.dims or not all(map(math.isfinite, numbers)):
            reason = f"it returned a vector that does not have {self.dims} finite numbers"
            raise InvalidPayload(path="index/embed", reason=reason)
        return f"[{','.join(map(repr, numbers))}]"


def _checked_paths(paths: Any, name: str) -> list[str]:
    if not isinstance(paths, list | tuple):
        raise InvalidPayload(path=name, reason=f"expected a list of paths, got {type(paths).__name__}")
    return [validation.text(path, name, limit=MAX_ID_BYTES) for path in paths]


def _distinct(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))
