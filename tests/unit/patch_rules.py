"""The rules of RFC 6901, RFC 6902 and Immer's paths as small cases: what applies, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from helix_store.core.types import JSON


@dataclass(frozen=True)
class Applies:
    rule: str
    document: JSON
    patches: list[Any]
    expected: JSON


@dataclass(frozen=True)
class Refuses:
    rule: str
    document: JSON
    patches: list[Any]
    index: int = 0


def add(path: Any, value: Any) -> dict[str, Any]:
    return {"op": "add", "path": path, "value": value}


def remove(path: Any) -> dict[str, Any]:
    return {"op": "remove", "path": path}


def replace(path: Any, value: Any) -> dict[str, Any]:
    return {"op": "replace", "path": path, "value": value}


def move(source: Any, path: Any) -> dict[str, Any]:
    return {"op": "move", "from": source, "path": path}


def copy(source: Any, path: Any) -> dict[str, Any]:
    return {"op": "copy", "from": source, "path": path}


def check(path: Any, value: Any) -> dict[str, Any]:
    return {"op": "test", "path": path, "value": value}


APPLIES = [
    Applies("no operations change nothing", {"plan": [1]}, [], {"plan": [1]}),
    Applies("add sets a new member", {"plan": 1}, [add("/next", 2)], {"plan": 1, "next": 2}),
    Applies("add overwrites a member", {"plan": 1}, [add("/plan", [2])], {"plan": [2]}),
    Applies("member names are case-sensitive", {"plan": 1}, [add("/Plan", 2)], {"plan": 1, "Plan": 2}),
    Applies("add takes null as a value", {}, [add("/plan", None)], {"plan": None}),
    Applies("add inserts before an item", ["x", "z"], [add("/1", "y")], ["x", "y", "z"]),
    Applies("add at the length appends", ["x"], [add("/1", "y")], ["x", "y"]),
    Applies("add with a dash appends", {"n": [[]]}, [add("/n/0/-", "y")], {"n": [["y"]]}),
    Applies("add does not flatten an array", [1], [add("/-", [2, 3])], [1, [2, 3]]),
    Applies("a dash names a member of an object", {}, [add("/-", 1)], {"-": 1}),
    Applies("digits name a member of an object", {"00": 1}, [replace("/00", 2)], {"00": 2}),
    Applies("add at the root replaces the document", {"a": 1}, [add("", [1])], [1]),
    Applies("replace at the root may leave a scalar", {"a": 1}, [replace("", None)], None),
    Applies("remove takes a member away", {"a": 1, "b": None}, [remove("/b")], {"a": 1}),
    Applies("remove closes the gap", [1, 2, 3, 4], [remove("/1"), remove("/1")], [1, 4]),
    Applies("replace changes an item in place", [[1], 2], [replace("/0/0", "x")], [["x"], 2]),
    Applies("move takes a value to another place", {"a": {"b": 1}}, [move("/a/b", "/c")], {"a": {}, "c": 1}),
    Applies("move counts indexes after the removal", [1, 2, 3], [move("/0", "/2")], [2, 3, 1]),
    Applies("move may overwrite its own parent", {"a": {"b": [1]}}, [move("/a/b", "/a")], {"a": [1]}),
    Applies("move may replace the document by a part", {"a": {"b": 1}}, [move("/a", "")], {"b": 1}),
    Applies("move of the document onto itself does nothing", {"a": 1}, [move("", "")], {"a": 1}),
    Applies("a sibling with the same beginning is no child", {"a": 1}, [move("/a", "/ab")], {"ab": 1}),
    Applies("copy leaves the original", {"a": [1]}, [copy("/a", "/b")], {"a": [1], "b": [1]}),
    Applies("copy may go into its own child", {"a": {}}, [copy("/a", "/a/b")], {"a": {"b": {}}}),
    Applies("copy of the document into a member", {"a": 1}, [copy("", "/b")], {"a": 1, "b": {"a": 1}}),
    Applies(
        "a copy is a value of its own",
        {"a": [1]},
        [copy("/a", "/b"), add("/b/-", 2)],
        {"a": [1], "b": [1, 2]},
    ),
    Applies("test finds null", {"a": None}, [check("/a", None)], {"a": None}),
    Applies("test takes 1 and 1.0 for equal", {"a": [1, 2.0]}, [check("/a", [1.0, 2])], {"a": [1, 2.0]}),
    Applies(
        "test ignores the order of members",
        [{"a": 1, "b": 2}],
        [check("/0", {"b": 2, "a": 1})],
        [{"a": 1, "b": 2}],
    ),
    Applies("test sees the whole document", {"a": [{}]}, [check("", {"a": [{}]})], {"a": [{}]}),
    Applies(
        "other members of an operation are ignored", {}, [{**add("/a", 1), "value2": 2, "from": 3}], {"a": 1}
    ),
    Applies("a slash alone names the empty member", {"": 1}, [replace("/", 2)], {"": 2}),
    Applies("a trailing slash names the empty member", {"a": {}}, [add("/a/", 1)], {"a": {"": 1}}),
    Applies("~1 is a slash", {"a/b": 1}, [replace("/a~1b", 2)], {"a/b": 2}),
    Applies("~0 is a tilde", {"m~n": 1}, [replace("/m~0n", 2)], {"m~n": 2}),
    Applies("~01 is a tilde and a one", {"~1": 1, "/": 2}, [remove("/~01")], {"/": 2}),
    Applies("no other escapes are read", {"%61": 1, "\\u0061": 1}, [remove("/%61"), remove("/\\u0061")], {}),
    Applies("reserved names are data in values", {}, [add("/a", {"__proto__": 1})], {"a": {"__proto__": 1}}),
    Applies("reserved names are matched whole", {}, [add("/constructors", 1)], {"constructors": 1}),
    Applies(
        "an array path reads keys and indexes",
        {"a": [{"b": 1}]},
        [replace(["a", 0, "b"], 2)],
        {"a": [{"b": 2}]},
    ),
    Applies("an empty array path is the document", {"a": 1}, [replace([], [])], []),
    Applies(
        "array paths need no escapes", {"a/b": {"~0": 1}}, [replace(["a/b", "~0"], 2)], {"a/b": {"~0": 2}}
    ),
    Applies("array paths take digits for an index", [1, 2], [replace(["1"], 3)], [1, 3]),
    Applies("array paths append with a dash", {"a": []}, [add(["a", "-"], 1)], {"a": [1]}),
    Applies("both forms may stand in one operation", {"a": [1]}, [move(["a", 0], "/b")], {"a": [], "b": 1}),
    Applies(
        "a move onto itself is seen in both forms", {"a": [1, 2]}, [move("/a/0", ["a", 0])], {"a": [1, 2]}
    ),
    Applies("a smaller length truncates", {"a": [1, 2, 3]}, [replace(["a", "length"], 1)], {"a": [1]}),
    Applies("the present length changes nothing", [1, 2], [replace(["length"], 2)], [1, 2]),
    Applies("an object may have a length", {"length": 3}, [replace(["length"], "x")], {"length": "x"}),
]

NEAR_MEMBERS = {"a": 1, "~": 1, "~2": 1, "a~": 1, "~/": 1, "/a": 1, "a/b": 1}

NO_INDEXES = [
    "01",
    "00",
    "-1",
    "+1",
    "1_0",
    " 1",
    "1 ",
    "1\n",
    "1e0",
    "1.0",
    "0x1",
    "\u0661",
    "1\u0661",
    "²",
    "",
    "x",
]

NO_PATHS: list[Any] = [
    *(None, 1, True, {"a": 1}, b"/a", ("a",)),
    *(["a", None], ["a", 0.0], ["a", False], [["a"]], [{}]),
]

REFUSES = [
    Refuses("the parent must exist", {"a": 1}, [add("/b/c", 1)]),
    Refuses("replace does not create a parent", {"a": 1}, [replace("/b/c", 1)]),
    Refuses("a scalar has no members", {"a": "text"}, [add("/a/b", 1)]),
    Refuses("a scalar document has no members", "text", [add("/0", 1)]),
    Refuses("null has no members", {"a": None}, [remove("/a/b")]),
    Refuses("a scalar has no items", {"a": "text"}, [replace("/a/0", 1)]),
    Refuses("the member to remove must exist", {"a": 1}, [remove("/b")]),
    Refuses("the item to remove must exist", [1, 2], [remove("/2")]),
    Refuses("the member to replace must exist", {"a": 1}, [replace("/b", 1)]),
    Refuses("the item to replace must exist", [1], [replace("/1", 1)]),
    Refuses("the value to move must exist", {"a": 1}, [move("/b", "/c")]),
    Refuses("the value to move onto itself must exist", {"a": 1}, [move("/b", "/b")]),
    Refuses("the value to copy must exist", {"a": []}, [copy("/a/0", "/c")]),
    Refuses("the place to move to must exist after the removal", [1, 2], [move("/0", "/2")]),
    Refuses("add leaves no gap", [1], [add("/2", 1)]),
    Refuses("a dash names no item to read", [1], [check("/-", 1)]),
    Refuses("a dash names no item to replace", [1], [replace("/-", 1)]),
    Refuses("a dash names no item to remove", [1], [remove("/-")]),
    Refuses("a dash leads into no item", [[1]], [add("/-/0", 1)]),
    Refuses("the document cannot be removed", {"a": 1}, [remove("")]),
    Refuses("the document cannot be removed by an array path", {"a": 1}, [remove([])]),
    Refuses("a value is not moved into its child", {"a": {"b": 1}}, [move("/a", "/a/b")]),
    Refuses("the next item does not take the place of a moved one", [{}, {}], [move("/0", "/0/a")]),
    Refuses("the document is not moved into a member", {"a": 1}, [move("", "/a")]),
    Refuses("a child is seen through both forms", [[1], [2]], [move([0], "/0/0")]),
    Refuses("test fails on another value", {"a": 1}, [check("/a", 2)]),
    Refuses("test fails on a missing member", {"a": None}, [check("/b", None)]),
    Refuses("test tells true from 1", {"a": 1}, [check("/a", True)]),
    Refuses("test tells 0 from false", {"a": False}, [check("/a", 0)]),
    Refuses("test tells false from 0.0", {"a": 0.0}, [check("/a", False)]),
    Refuses("test tells a number from its text", {"a": 1}, [check("/a", "1")]),
    Refuses("test tells null from false", {"a": None}, [check("/a", False)]),
    Refuses("test looks into nested values", {"a": [{"b": [1]}]}, [check("/a", [{"b": [True]}])]),
    Refuses("test counts items", {"a": [1]}, [check("/a", [1, 1])]),
    Refuses("test counts members", {"a": {"b": 1}}, [check("/a", {"b": 1, "c": 2})]),
    Refuses("test tells an object from an array", {"a": {}}, [check("/a", [])]),
    Refuses("test does not round large integers", {"a": 2**53 + 1}, [check("/a", float(2**53))]),
    Refuses("an unknown operation", {}, [{"op": "merge", "path": "/a", "value": 1}]),
    Refuses("operations are in lower case", {}, [{"op": "Add", "path": "/a", "value": 1}]),
    Refuses("a missing op", {}, [{"path": "/a", "value": 1}]),
    Refuses("an op that is a list", {}, [{"op": ["add"], "path": "/a", "value": 1}]),
    Refuses("an operation that is no object", {}, ["add"]),
    Refuses("an operation that is a list", {}, [["add", "/a", 1]]),
    Refuses("a missing path", {}, [{"op": "add", "value": 1}]),
    Refuses("add without a value", {}, [{"op": "add", "path": "/a"}]),
    Refuses("replace without a value", {"a": 1}, [{"op": "replace", "path": "/a"}]),
    Refuses("test without a value", {"a": None}, [{"op": "test", "path": "/a"}]),
    Refuses("move without a source", {"a": 1}, [{"op": "move", "path": "/b"}]),
    Refuses("copy without a source", {"a": 1}, [{"op": "copy", "path": "/b"}]),
    Refuses("the failing operation is counted from 0", {}, [add("/a", 1), check("/a", 1), remove("/b")], 2),
    Refuses("a growing length", [1], [replace(["length"], 2)]),
    Refuses("a negative length", [1], [replace(["length"], -1)]),
    Refuses("a length that is a bool", [1], [replace(["length"], True)]),
    Refuses("a length that is a float", [1], [replace(["length"], 0.0)]),
    Refuses("a length that is text", [1], [replace(["length"], "0")]),
    Refuses("a length without a value", [1], [{"op": "replace", "path": ["length"]}]),
    Refuses("a length to add", [1], [add(["length"], 0)]),
    Refuses("a length to remove", [1], [remove(["length"])]),
    Refuses("a length in a pointer", [1], [replace("/length", 0)]),
    Refuses("an index for an object member", {"0": 1}, [replace([0], 2)]),
    Refuses("an index for a new object member", {}, [add([0], 2)]),
    Refuses("a negative index", [1, 2], [remove([-1])]),
    Refuses("an index beyond the end", [1], [add([2], 1)]),
    *(
        Refuses(f"no JSON pointer: {path!r}", NEAR_MEMBERS, [check(path, 1)])
        for path in ("a", "a/b", "#/a", " /a", "/~", "/~2", "/a~", "/~~1", "~1a")
    ),
    *(
        Refuses(f"no array index: {index!r}", list(range(12)), [patch])
        for index in NO_INDEXES
        for patch in (add(f"/{index}", 1), remove([index]))
    ),
    *(
        Refuses(f"an index of {len(digits)} digits", [1], [add(f"/{digits}", 1)])
        for digits in ("100000000000000000000", "9" * 5_000)
    ),
    *(
        Refuses(f"no path: {path!r}", {"a": [1]}, [patch])
        for path in NO_PATHS
        for patch in (add(path, 1), copy(path, "/b"))
    ),
    *(
        Refuses(f"a reserved name in {path!r}", {name: {"a": 1}, "a": {}}, [patch])
        for name in ("__proto__", "constructor", "prototype")
        for path in (f"/{name}", f"/{name}/a", f"/a/{name}", [name], [name, "a"], ["a", name])
        for patch in (add(path, 1), copy(path, "/b"))
    ),
]
