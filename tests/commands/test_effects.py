"""``helix_sessions effects`` and ``settle``, and the effects that ``show`` names."""

from __future__ import annotations

import pytest
from django.contrib.auth.models import Permission, User

from helix_store.stores import DatabaseStateStore
from tests.cells import for_each
from tests.commands.running import Ended, run
from tests.databases import CommittedDatabase


@pytest.fixture
def store(empty_db: CommittedDatabase) -> DatabaseStateStore:
    store = DatabaseStateStore(empty_db.alias, tenant=empty_db.tenant)
    session = store.new_session("journey", agent_type="travel")
    with session.effect("mail", tool_name="mail") as effect:
        effect.done({"id": 1})
    with pytest.raises(TimeoutError), session.effect("pay", tool_name="pay", input=[7]):
        raise TimeoutError
    return store


def command(store: DatabaseStateStore, name: str, *arguments: str, form: str = "json") -> Ended:
    return run(store.alias, "helix_sessions", name, *arguments, "--tenant", store.tenant, "--format", form)


def test_effects_are_listed(store: DatabaseStateStore) -> None:
    ended = command(store, "effects", "journey")
    assert ended.data == {
        "effects": [
            {"tenant": store.tenant, **each.to_dict()} for each in store.list_effects("journey").items
        ],
        "next_cursor": None,
    }
    unknown = command(store, "effects", "journey", "--state", "unknown").data["effects"]
    assert [each["id"] for each in unknown] == ["pay"]
    assert command(store, "effects").data["effects"] == unknown
    table = command(store, "effects", "journey", form="table").out
    assert "mail" in table
    assert "unknown" in table
    assert "journey" in command(store, "effects", form="table").out


def test_show_names_the_effects_that_are_not_decided(store: DatabaseStateStore) -> None:
    assert [each["id"] for each in command(store, "show", "journey").data["open_effects"]] == ["pay"]
    assert "EFFECTS THAT ARE NOT DECIDED" in command(store, "show", "journey", form="table").out.upper()


def test_an_effect_is_settled_once(store: DatabaseStateStore) -> None:
    ended = command(store, "settle", "journey", "pay", "done", "--result", '{"receipt": 7}', "--actor", "ann")
    assert ended.data == {
        "tenant": store.tenant,
        "session_id": "journey",
        "effect_id": "pay",
        "outcome": "done",
    }
    (effect,) = store.list_effects("journey", states=["done"]).items[1:]
    assert (effect.result, effect.actors) == ({"receipt": 7}, ["ann"])
    again = command(store, "settle", "journey", "pay", "not_done")
    assert again.code == 1
    assert "decided already" in again.err


def test_a_user_needs_the_permission(store: DatabaseStateStore) -> None:
    user = User.objects.create_user("settler")
    try:
        refused = command(store, "settle", "journey", "pay", "not_done", "--as", "settler")
        assert refused.code == 1
        assert "helix_store.settle_effect" in refused.err
        user.user_permissions.add(Permission.objects.get(codename="settle_effect"))
        assert command(store, "settle", "journey", "pay", "not_done", "--as", "settler").code == 0
        (effect,) = store.list_effects("journey", states=["not_done"]).items
        assert effect.actors == [f"user:{user.pk}"]
    finally:
        user.delete()


@for_each(
    "arguments, code, words",
    [
        (("settle", "journey", "pay", "not_done", "--result", "1"), 2, "no --result"),
        (("settle", "journey", "pay", "done", "--result", "{"), 2, "JSON"),
        (("settle", "journey", "pay", "done", "--as", "nobody"), 2, "no user"),
        (("settle", "journey", "pay", "done", "--as", "ann", "--actor", "ann"), 2, "either"),
        (("settle", "journey", "unknown", "done"), 1, "no effect"),
        (("settle", "elsewhere", "pay", "done"), 1, "no session"),
        (("effects", "--state", "done"), 2, "ID"),
    ],
)
def test_wrong_usage_is_refused(
    store: DatabaseStateStore, arguments: tuple[str, ...], code: int, words: str
) -> None:
    ended = command(store, *arguments)
    assert (ended.code, ended.out) == (code, "")
    assert words in ended.err
    assert store.find_unknown_effects()
