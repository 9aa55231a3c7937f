"""Random documents, patches that often apply, and patches of any shape at all."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

KEYS = st.sampled_from(["a", "b", "notes", "a/b", "m~n", "", "0", "-", "length", "\x00", "é"])
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([0.5, -0.0, 1.0, 2**70, "", "text", "\ud800"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(KEYS, VALUES, max_size=5)


def _pointer(segments: list[str | int]) -> str:
    return "".join("/" + str(segment).replace("~", "~0").replace("/", "~1") for segment in segments)


SEGMENTS = st.lists(KEYS | st.integers(0, 4), max_size=3)
PATHS = SEGMENTS | SEGMENTS.map(_pointer)
OPERATIONS = st.fixed_dictionaries(
    {"op": st.sampled_from(["add", "remove", "replace", "move", "copy", "test"]), "path": PATHS},
    optional={"value": VALUES, "from": PATHS},
)
PATCHES = st.lists(OPERATIONS, max_size=8)


@st.composite
def documents_and_changes(draw: st.DrawFn) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A document with a patch whose operations all apply: they go to members of the document itself."""
    document = draw(st.dictionaries(KEYS, VALUES, min_size=1, max_size=5))
    patches: list[dict[str, Any]] = []
    for key in draw(st.lists(st.sampled_from(sorted(document)), min_size=1, max_size=5)):
        path = draw(st.sampled_from([[key], _pointer([key])]))
        other = draw(KEYS.filter(key.__ne__))
        patches += draw(
            st.sampled_from(
                [
                    [{"op": "replace", "path": path, "value": draw(VALUES)}],
                    [{"op": "copy", "from": path, "path": [other]}],
                    [{"op": "add", "path": [other], "value": draw(VALUES)}],
                    [
                        {"op": "add", "path": path, "value": []},
                        {"op": "copy", "from": "", "path": [key, "-"]},
                    ],
                    [
                        {"op": "move", "from": path, "path": [other]},
                        {"op": "copy", "from": [other], "path": path},
                    ],
                ]
            )
        )
    return document, patches


class Opaque:
    """A value of a type that JSON does not have."""


FOREIGN = st.sampled_from(
    [
        math.nan,
        math.inf,
        b"/a",
        (1,),
        {1},
        {1: 2},
        {None: 1},
        Opaque(),
        Opaque,
        10**4_000,
        -1,
        [[[]]],
        "x" * 99,
    ]
)
ANYTHING = st.recursive(
    SCALARS | FOREIGN | PATHS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=5,
)
HOSTILE_PATHS = PATHS | ANYTHING | st.text(max_size=4) | st.lists(KEYS | FOREIGN, max_size=3)
HOSTILE_OPERATIONS = ANYTHING | st.fixed_dictionaries(
    {},
    optional={
        "op": st.sampled_from(["add", "remove", "replace", "move", "copy", "test"]) | ANYTHING,
        "path": HOSTILE_PATHS,
        "from": HOSTILE_PATHS,
        "value": ANYTHING,
    },
)
HOSTILE_PATCHES = st.lists(HOSTILE_OPERATIONS, max_size=5) | ANYTHING


def container_ids(value: Any) -> Iterator[int]:
    """The identity of every dict and list in a value, once for each place it stands in."""
    if isinstance(value, dict | list):
        yield id(value)
        for item in value.values() if isinstance(value, dict) else value:
            yield from container_ids(item)
