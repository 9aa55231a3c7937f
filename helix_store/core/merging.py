"""Merging changes into a document, and promoting staged changes (merges or patches)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from helix_store.core.limits import Limits
from helix_store.core.patches import PatchedCopy
from helix_store.core.payloads import copy_json, shown_key
from helix_store.core.types import StagedChanges
from helix_store.exceptions import InvalidPayload, PatchError

__all__ = ["merge_changes"]


def merge_changes(
    document: dict[str, Any],
    changes: dict[str, Any],
    array_replacements: Iterable[str] = (),
) -> tuple[dict[str, Any], list[str]]:
    """Return a copy of the document with the changes merged in, and warnings.

    A new value replaces the stored value of its top-level key. An array is appended to a stored array unless
    its key is in ``array_replacements``. An array replaces a stored value of another type, with a warning.
    The result shares no references with the input.
    """
    merged: dict[str, Any] = copy_json(_object(document, "the document"))
    incoming: dict[str, Any] = copy_json(_object(changes, "the changes"))
    return merged, _merge_into(merged, incoming, array_replacements)


def promote_staged(
    document: dict[str, Any],
    staged: Iterable[StagedChanges],
    *,
    limits: Limits | None = None,
) -> dict[str, Any]:
    """Return a copy of ``custom_state`` with all staged changes applied, in the order given.

    If a change has patches and a merge, only the patches are applied. The input is not changed and the result
    shares no references with it. Raises `PatchError` for the first operation that cannot be applied or whose
    result is not an object, and `LimitExceeded` as `apply_patches` does, but counts the copies of all changes
    together.
    """
    promoted = _promoted(document, staged, limits or Limits())
    promoted.check_limits()
    return _object(promoted.document, "the document")


def with_staged(
    document: dict[str, Any], staged: Sequence[StagedChanges], *, limits: Limits
) -> dict[str, Any]:
    """Return the result of `promote_staged`, for a caller that checks the limits when it encodes it. The
    result shares references with the document, which does not change, and with the staged changes.
    """
    if any(change.patches for change in staged):
        return _object(_promoted(document, staged, limits).document, "the document")
    promoted = dict(_object(document, "the document"))
    merged = [_object(change.merge_changes, "the changes") for change in staged if change.merge_changes]
    for key in {key for changes in merged for key in changes}:
        if isinstance(promoted.get(key), list):
            promoted[key] = promoted[key].copy()
    for changes in merged:
        _merge_into(promoted, changes, ())
    return promoted


def _promoted(document: dict[str, Any], staged: Iterable[StagedChanges], limits: Limits) -> PatchedCopy:
    promoted = PatchedCopy(_object(document, "the document"), limits=limits)
    for change in staged:
        if change.patches:
            promoted.apply(change.patches)
            if not isinstance(promoted.document, dict):
                # The last operation that targets the whole document has replaced the object.
                index = max(index for index, each in enumerate(change.patches) if not each["path"])
                op = change.patches[index]["op"]
                raise PatchError(index=index, op=op, reason="custom_state must stay an object")
        elif change.merge_changes is not None:
            changes = copy_json(_object(change.merge_changes, "the changes"))
            _merge_into(promoted.document, changes, ())
    return promoted


def _merge_into(
    document: dict[str, Any], incoming: dict[str, Any], array_replacements: Iterable[str]
) -> list[str]:
    if isinstance(array_replacements, str):
        raise InvalidPayload(path="", reason="array_replacements must be a collection of keys, not a string")
    replacements = frozenset(array_replacements)
    warnings = []
    for key, value in incoming.items():
        if key in document and isinstance(value, list) and key not in replacements:
            stored = document[key]
            if isinstance(stored, list):
                stored.extend(value)
                continue
            warnings.append(f"{shown_key(key)!r} had a value that is not an array; it was replaced")
        document[key] = value
    return warnings


def _object(value: Any, name: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise InvalidPayload(path="", reason=f"{name} must be a dict, not {type(value).__name__}")
    return value
