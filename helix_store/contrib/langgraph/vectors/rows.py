"""The statements on the table of vectors."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final

from django.db.models import FloatField, Func, IntegerField, OuterRef, Q, QuerySet, Subquery, Value
from django.db.models.functions import Cast

from helix_store.contrib.langgraph.vectors.index import Index
from helix_store.contrib.langgraph.vectors.models import LangGraphVector, VectorField
from helix_store.engine.database import Database

_AT_ONCE: Final = 200
_OPERATORS: Final = {"cosine": "<=>", "l2": "<->", "inner_product": "<#>"}


def delete_vectors(db: Database, at: Q) -> None:
    LangGraphVector.objects.using(db.alias).filter(at, tenant=db.tenant).delete()


def insert_vectors(db: Database, vectors: Iterable[tuple[str, str, str, str]], written_at: datetime) -> None:
    """Insert vectors, each with the namespace and key of its memory, and the path of its text."""
    rows = [
        LangGraphVector(
            tenant=db.tenant, namespace=namespace, key=key, path=path, embedding=vector, written_at=written_at
        )
        for namespace, key, path, vector in vectors
    ]
    LangGraphVector.objects.using(db.alias).bulk_create(rows, batch_size=_AT_ONCE)


def with_distance(memories: QuerySet[Any], index: Index, vector: str) -> QuerySet[Any]:
    """Annotate memories with the ``distance`` of their nearest text, or null if they have no vectors.

    Vectors with a different number of dimensions, from an earlier model, are ignored.
    """
    vectors = LangGraphVector.objects.using(memories.db).filter(
        tenant=OuterRef("tenant"),
        namespace=OuterRef("namespace"),
        key=OuterRef("key"),
        written_at=OuterRef("updated_at"),
    )
    of_these = vectors.annotate(
        dims=Func("embedding", function="vector_dims", output_field=IntegerField()),
        distance=Func(
            "embedding",
            Cast(Value(vector), VectorField()),
            template="(%(expressions)s)",
            arg_joiner=f" {_OPERATORS[index.distance]} ",
            output_field=FloatField(),
        ),
    ).filter(dims=index.dims)
    nearest = of_these.order_by("distance").values("distance")[:1]
    found: QuerySet[Any] = memories.annotate(distance=Subquery(nearest))
    return found
