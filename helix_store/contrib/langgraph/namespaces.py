"""Namespaces as text. A dot follows each label, so that no label is a prefix of another one."""

from __future__ import annotations

import re
from collections.abc import Sequence

from django.db.models import Q

from helix_store.core import validation
from helix_store.core.limits import MAX_NAMESPACE_BYTES

_WILDCARD = "*"


def namespace_text(labels: Sequence[str], name: str = "namespace") -> str:
    """Return a namespace as text. Raises `InvalidPayload` or `LimitExceeded` if it cannot be stored."""
    return validation.text("".join(f"{label}." for label in labels), name, limit=MAX_NAMESPACE_BYTES)


def labels_of(text: str) -> tuple[str, ...]:
    return tuple(text[:-1].split("."))


def end_of(text: str) -> str:
    """Return the first text after all namespaces under this one; the character after the dot is a slash."""
    return f"{text[:-1]}/"


def is_under(text: str) -> Q:
    """Return the namespace itself and all namespaces under it: one range of the index."""
    return Q(namespace__gte=text, namespace__lt=end_of(text)) if text else Q()


def matches(match_type: str, path: Sequence[str]) -> Q:
    """Return the namespaces that begin or end with a path, in which ``*`` is any one label."""
    labels = namespace_text(path, "path")
    if not labels:
        return Q()
    pattern = "".join(r"[^.]+\." if label == _WILDCARD else re.escape(f"{label}.") for label in path)
    if match_type == "suffix":
        return Q(namespace__regex=rf"(^|\.){pattern}$")
    if _WILDCARD not in path:
        return is_under(labels)
    first = path[: path.index(_WILDCARD)]
    return is_under(namespace_text(first)) & Q(namespace__regex=f"^{pattern}")
