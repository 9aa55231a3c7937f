"""Every call that deletes: it refuses an argument that makes no sense before it asks a database."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import pytest

from helix_store.cleanup import erase, expired_session_cleanup
from helix_store.doctor import diagnose
from helix_store.exceptions import InvalidPayload, InvalidQuery
from helix_store.retention import apply_retention, prune_streams
from helix_store.stores import InMemoryStateStore
from helix_store.stores.directory import SessionDirectory
from helix_store.transfer.moves import TenantMove
from tests.cells import for_each
from tests.cleanup.providers import MemoryProvider

CALLS: Final[dict[str, Callable[..., Any]]] = {
    "expired_session_cleanup": expired_session_cleanup,
    "apply_retention": apply_retention,
    "erase": partial(erase, session_id="session"),
    "prune_streams": partial(prune_streams, older_than=None),
    "prune_checkpoints": partial(SessionDirectory().prune_checkpoints, keep=1),
    "diagnose": diagnose,
    "delete_session": partial(InMemoryStateStore().delete_session, "session"),
    "TenantMove": partial(TenantMove, "tenant", "default", "other"),
}


def flags() -> Iterator[tuple[str, str, Any]]:
    for title, call in CALLS.items():
        for each in inspect.signature(call).parameters.values():
            if each.annotation == "bool":
                yield from ((title, each.name, value) for value in ("no", "", 0, 1, None))


@for_each(("title", "name", "value"), flags(), shared=True)
def test_only_true_and_false_are_flags(title: str, name: str, value: Any) -> None:
    """A text such as "no" would force an erasure or fix a database, and 0 would end a dry run."""
    with pytest.raises((InvalidQuery, InvalidPayload), match=name) as refused:
        CALLS[title](**{name: value})
    assert refused.value.to_dict()["path"] == f"/{name}"


def arguments() -> Iterator[tuple[str, dict[str, Any]]]:
    for title in ("expired_session_cleanup", "apply_retention", "erase"):
        yield title, {"progress": 5}
        yield title, {"workspace_providers": ["memory"]}
        yield title, {"workspace_providers": {5: MemoryProvider()}}
    for title in ("expired_session_cleanup", "apply_retention", "prune_checkpoints"):
        yield from ((title, {"page_size": value}) for value in (0, -1, True, 1.5, "many"))
    yield "apply_retention", {"policy": {"sessions_idle_days": {}}}
    yield from (("prune_checkpoints", {"before": value}) for value in ("now", True))
    yield from (("prune_streams", {"older_than": value}) for value in (True, 5, "7d"))


@for_each(("title", "given"), arguments(), ids=str, shared=True)
def test_an_argument_that_makes_no_sense_is_named(title: str, given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(InvalidQuery, match=name) as refused:
        CALLS[title](**given)
    assert refused.value.path == f"/{name}"


@for_each("title", ["expired_session_cleanup", "apply_retention", "erase"], shared=True)
def test_an_object_that_cannot_list_snapshots_is_no_provider(title: str) -> None:
    with pytest.raises(TypeError, match="'memory' is not a workspace provider"):
        CALLS[title](workspace_providers={"memory": object()})
