"""Errors: one root, typed, picklable, and silent about payloads."""

from __future__ import annotations

import copy
import inspect
import pickle
from datetime import UTC, datetime
from typing import Any

import pytest

from helix_store import exceptions
from helix_store.exceptions import HelixStoreError, NotApproved, NotPermitted
from tests.cells import for_each

CLASSES: list[type[HelixStoreError]] = [
    value
    for value in vars(exceptions).values()
    if inspect.isclass(value) and issubclass(value, HelixStoreError)
]

ARGUMENTS: dict[str, dict[str, Any]] = {
    "SessionNotFound": {"session_id": "s-1"},
    "CheckpointNotFound": {"checkpoint_id": "c-1"},
    "RunNotFound": {"run_id": "r-1"},
    "StreamNotFound": {"stream_id": "st-1"},
    "SessionBusy": {"session_id": "s-1"},
    "SessionEnded": {"session_id": "s-1", "status": "completed"},
    "SessionErased": {"session_id": "s-1", "status": "erased"},
    "SessionExists": {"session_id": "s-1"},
    "IdempotencyConflict": {"operation_id": "o-1"},
    "NotPermitted": {"tool_call_id": "t-1", "reason": "permission", "permission": "shop.refund"},
    "NotApproved": {"tool_call_id": "t-1", "reason": "open"},
    "ApprovalUsed": {"tool_call_id": "t-1", "step_id": "step-2", "effect_id": None},
    "StaleStateError": {"expected_version": 3, "current_version": 5},
    "FencedOutError": {"token": 3, "current_token": 5},
    "InvalidQuery": {"path": "/limit"},
    "InvalidPayload": {"path": "/a/0", "reason": "NaN and infinity are not JSON"},
    "LimitExceeded": {"limit": 10, "actual": 11, "name": "max_chunk_bytes"},
    "PatchError": {"index": 2, "op": "add", "reason": "no such path"},
    "StreamTruncated": {"oldest": 17},
    "OutcomeUnknown": {"operation_id": "o-1"},
    "BudgetExceeded": {"name": "daily", "limit": 10, "spent": 9, "held": 1},
    "EffectUnknown": {
        "effect_id": "call-2",
        "tool_name": "refund",
        "started_at": datetime(2026, 1, 1, tzinfo=UTC),
    },
    "TurnInterrupted": {"kind": "interrupt", "reason": "lunch"},
}
"""What the classes with attributes of their own are made from; the others take a message or nothing."""

FIGURES = {
    "ApprovalUsed",
    "BudgetExceeded",
    "EffectUnknown",
    "NotApproved",
    "NotPermitted",
    "SessionEnded",
    "SessionErased",
    "StaleStateError",
    "FencedOutError",
    "InvalidPayload",
    "LimitExceeded",
    "PatchError",
}
NAMES_ITS_ID = {
    "SessionNotFound",
    "CheckpointNotFound",
    "RunNotFound",
    "StreamNotFound",
    "SessionBusy",
    "SessionExists",
    "IdempotencyConflict",
}


def _example(cls: type[HelixStoreError]) -> HelixStoreError:
    return cls(**ARGUMENTS.get(cls.__name__, {}))


every_class = for_each("cls", CLASSES, ids=lambda cls: cls.__name__)


def test_every_class_is_exported_and_under_the_root() -> None:
    assert sorted(exceptions.__all__) == sorted(cls.__name__ for cls in CLASSES)
    assert all(issubclass(cls, HelixStoreError) for cls in CLASSES)


def test_codes_are_distinct() -> None:
    codes = [cls.code for cls in CLASSES]
    assert len(set(codes)) == len(codes)


@every_class
def test_the_docstring_is_the_message_unless_the_class_has_figures_to_tell(
    cls: type[HelixStoreError],
) -> None:
    docstring = inspect.getdoc(cls)
    assert docstring
    if cls.__name__ in FIGURES:
        values = [value for value in ARGUMENTS[cls.__name__].values() if value is not None]
        assert all(str(value).removesuffix("+00:00") in str(_example(cls)) for value in values)
    elif cls.__name__ in NAMES_ITS_ID:
        (value,) = ARGUMENTS[cls.__name__].values()
        named = docstring.splitlines()[0].replace("this id", f"the id '{value}'")
        assert named == str(_example(cls)) != docstring.splitlines()[0]
    else:
        assert str(_example(cls)) == docstring.splitlines()[0]


@every_class
def test_an_error_survives_pickling_and_copying(cls: type[HelixStoreError]) -> None:
    error = _example(cls)
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):  # noqa: S301 - our own bytes
        assert type(twin) is cls
        assert str(twin) == str(error)
        assert twin.to_dict() == error.to_dict()
        assert {name: getattr(twin, name) for name in error.attributes} == error.attributes


@every_class
def test_the_arguments_are_attributes_and_part_of_the_dict(cls: type[HelixStoreError]) -> None:
    error = _example(cls)
    arguments = ARGUMENTS.get(cls.__name__, {})
    assert {name: getattr(error, name) for name in arguments} == arguments
    assert error.to_dict() == {
        "code": cls.code,
        "message": str(error),
        "retryable": error.retryable,
        "applied": error.applied,
        **arguments,
    }


def test_a_message_of_ones_own_replaces_the_docstring_and_is_pickled() -> None:
    error = exceptions.InvalidQuery("limit must be a whole number.", path="limit")
    twin = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert (str(twin), twin.path) == ("limit must be a whole number.", "/limit")


@for_each("name", sorted(NAMES_ITS_ID))
@for_each(
    ("given", "shown"),
    [
        ("it's", '"it\'s"'),
        ("line\nbreak\x1b[31m\u202e", r"'line\nbreak\x1b[31m\u202e'"),
        ("x" * 60, f"'{'x' * 60}'"),
        ("x" * 61, f"'{'x' * 60}…'"),
        ("x" * 5_000_000, f"'{'x' * 60}…'"),
    ],
    ids=["quote", "controls", "longest", "longer", "huge"],
)
def test_an_id_is_escaped_and_cut_in_the_message_and_whole_as_the_attribute(
    name: str, given: str, shown: str
) -> None:
    (attribute,) = ARGUMENTS[name]
    error = getattr(exceptions, name)(given)
    assert f"the id {shown}" in str(error)
    assert getattr(error, attribute) == given


def test_an_unknown_word_of_a_reason_has_a_message_too() -> None:
    """As one that a newer version has sent, or a test has made up."""
    unknown: Any = "weather"
    error = NotPermitted("call-1", unknown)
    assert error.to_dict()["reason"] == "weather"
    assert str(error) == "This actor may not answer the call 'call-1': it needs another actor."
    assert str(NotApproved("call-1", unknown)).startswith("The call 'call-1' is not approved (weather)")
    for each in (error, NotApproved("call-1", unknown)):
        assert pickle.loads(pickle.dumps(each)).to_dict() == each.to_dict()  # noqa: S301


def test_an_error_without_an_id_has_the_message_of_its_class() -> None:
    wrong = {}
    for name in (
        "CheckpointNotFound",
        "IdempotencyConflict",
        "RunNotFound",
        "SessionExists",
        "SessionNotFound",
        "StreamNotFound",
    ):
        cls = getattr(exceptions, name)
        if str(cls()) != cls.__doc__:
            wrong[name] = str(cls())
    assert not wrong


@pytest.mark.parametrize(
    ("given", "path"),
    [("", ""), ("/a/0", "/a/0"), ("limit", "/limit"), ("messages/0/role", "/messages/0/role")],
)
def test_a_path_is_a_json_pointer(given: str, path: str) -> None:
    assert exceptions.InvalidPayload(path=given, reason="no").path == path
    assert exceptions.InvalidQuery("No.", path=given).path == path
    assert exceptions.InvalidQuery().path == ""


def test_only_what_may_pass_by_itself_is_retryable() -> None:
    retryable = {cls.__name__ for cls in CLASSES if cls.retryable}
    assert retryable == {"SessionBusy", "StoreBusy", "StoreUnavailable", "TenantMoved"}


def test_only_a_lost_commit_leaves_the_outcome_open() -> None:
    assert {cls.__name__ for cls in CLASSES if cls.applied != "no"} == {"OutcomeUnknown"}
    assert exceptions.OutcomeUnknown.applied == "unknown"


@for_each(
    ("cls", "parent"),
    [
        (exceptions.SessionNotFound, exceptions.NotFoundError),
        (exceptions.CheckpointNotFound, exceptions.NotFoundError),
        (exceptions.RunNotFound, exceptions.NotFoundError),
        (exceptions.StreamNotFound, exceptions.NotFoundError),
        (exceptions.SessionExists, exceptions.ConflictError),
        (exceptions.IdempotencyConflict, exceptions.ConflictError),
    ],
)
def test_families_can_be_caught_together(cls: type[HelixStoreError], parent: type[HelixStoreError]) -> None:
    with pytest.raises(parent):
        raise _example(cls)
