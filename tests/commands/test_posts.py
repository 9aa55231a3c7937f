"""``helix_sessions post``, ``withdraw-post``, ``posts`` and ``wake``."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from helix_store.core import moments
from helix_store.models import Post
from helix_store.signals import session_posted
from helix_store.stores import DatabaseStateStore
from tests.commands.running import Ended, run
from tests.databases import CommittedDatabase

TEXT = "And vegetarian, please."


@pytest.fixture
def store(empty_db: CommittedDatabase) -> DatabaseStateStore:
    store = DatabaseStateStore(empty_db.alias, tenant=empty_db.tenant)
    store.create_session("journey", agent_type="travel")
    return store


@pytest.fixture
def posted() -> Iterator[list[tuple[str, str]]]:
    """The session and the author of each signal."""
    received: list[tuple[str, str]] = []

    def receive(session_id: str, author: str, **kwargs: Any) -> None:
        received.append((session_id, author))

    session_posted.connect(receive)
    yield received
    session_posted.disconnect(receive)


def command(store: DatabaseStateStore, name: str, *arguments: str) -> Ended:
    return run(store.alias, "helix_sessions", name, *arguments, "--tenant", store.tenant, "--format", "json")


def test_a_message_is_posted(store: DatabaseStateStore) -> None:
    ended = command(store, "post", "journey", TEXT, "--author", "ada", "--key", "form-7")
    assert ended.code == 0, ended.err
    (post,) = store.list_posts("journey").items
    assert ended.data == {"tenant": store.tenant, **post.to_dict()}
    assert (post.message, post.author, post.key) == ({"role": "user", "content": TEXT}, "ada", "form-7")
    assert command(store, "post", "journey", TEXT, "--author", "ada", "--key", "form-7").data == ended.data
    assert len(store.list_posts("journey").items) == 1


def test_a_message_is_posted_for_later(store: DatabaseStateStore) -> None:
    assert command(store, "post", "journey", TEXT, "--not-before", "2099-01-01T00:00+00:00").code == 0
    (post,) = store.list_posts("journey").items
    assert post.not_before is not None
    assert post.not_before.isoformat() == "2099-01-01T00:00:00+00:00"
    refused = command(store, "post", "journey", TEXT, "--not-before", "soon")
    assert refused.out == ""
    assert (
        "argument --not-before: expected a date or time such as 2026-11-22T12:00, got 'soon'" in refused.err
    )


def test_a_session_that_has_ended_takes_no_post(store: DatabaseStateStore) -> None:
    store.update_status("journey", "completed")
    refused = command(store, "post", "journey", TEXT)
    assert (refused.code, refused.out) == (1, "")
    assert "accepts no posts; nothing was stored" in refused.err
    assert store.list_posts("journey").items == []


def test_a_waiting_post_is_withdrawn_once(store: DatabaseStateStore) -> None:
    post = store.post_message("journey", {"role": "user", "content": TEXT})
    ended = command(store, "withdraw-post", "journey", post.post_id)
    assert ended.data == {
        "tenant": store.tenant,
        "session_id": "journey",
        "post_id": post.post_id,
        "withdrawn": True,
    }
    again = command(store, "withdraw-post", "journey", post.post_id)
    assert (again.code, again.out) == (1, "")
    assert "is waiting in this session; nothing was changed" in again.err


def test_posts_are_listed_by_state(store: DatabaseStateStore) -> None:
    first, second = (store.post_message("journey", {"role": "user", "content": text}) for text in "ab")
    store.withdraw_post("journey", first.post_id)

    def listed(*arguments: str) -> list[tuple[str, str]]:
        posts = command(store, "posts", "journey", *arguments).data["posts"]
        return [(post["post_id"], post["state"]) for post in posts]

    assert listed() == [(second.post_id, "waiting")]
    assert listed("--state", "withdrawn") == [(first.post_id, "withdrawn")]
    both = ["--state", "waiting", "--state", "withdrawn"]
    assert listed(*both) == [(first.post_id, "withdrawn"), (second.post_id, "waiting")]
    page = command(store, "posts", "journey", *both, "--limit", "1").data
    assert [post["post_id"] for post in page["posts"]] == [first.post_id]
    assert listed(*both, "--cursor", page["next_cursor"]) == [(second.post_id, "waiting")]


def test_a_table_shows_what_waits(store: DatabaseStateStore) -> None:
    store.post_message("journey", {"role": "user", "content": TEXT}, author="ada")
    store.post_message("journey", {"role": "user", "content": [{"type": "text", "text": "Hi"}]})
    ended = run(store.alias, "helix_sessions", "posts", "journey", "--wide")
    assert ended.code == 0, ended.err
    heading, first, second = ended.out.splitlines()
    assert heading.split() == ["#", "post", "state", "author", "due", "message"]
    assert first.split()[0] == "1"
    assert "ada" in first
    assert first.endswith(TEXT)
    assert second.endswith('[{"type": "text", "text": "Hi"}]')


def test_sessions_whose_posts_nobody_picks_up_are_announced(
    store: DatabaseStateStore, posted: list[tuple[str, str]]
) -> None:
    store.create_session("quiet", agent_type="travel")
    store.post_message("journey", {"role": "user", "content": TEXT}, author="ada")
    posted.clear()
    assert command(store, "wake").data == {"announced": 1, "ready": 0}
    assert posted == [("journey", "ada")]
    store.receive_posts("journey")
    assert command(store, "wake").data == {"announced": 0, "ready": 0}
    assert posted == [("journey", "ada")]


def test_a_page_shows_the_first_waiting_posts_in_the_order_of_their_reception(
    store: DatabaseStateStore,
) -> None:
    tomorrow = moments.now() + timedelta(days=1)
    store.post_message("journey", {"role": "user", "content": "Later"}, not_before=tomorrow, key="k")
    long = store.post_message("journey", {"role": "user", "content": "x" * 2_000}, author="ada")
    broken = store.post_message("journey", {"role": "user", "content": "lost"})
    store.withdraw_post("journey", store.post_message("journey", {"role": "user"}).post_id)
    Post.objects.using(store.alias).filter(post_id=broken.post_id).update(payload="{")
    shown = command(store, "show", "journey", "--limit", "2").data["waiting_posts"]
    assert shown["total"] == 3
    assert [item["post_id"] for item in shown["items"]] == [long.post_id, broken.post_id]
    first, unreadable = shown["items"]
    assert first["text"].startswith("xxx")
    assert first["text"].endswith("x…")
    assert len(first["text"]) < 1_600
    assert (first["author"], first["key"], first["sequence"]) == ("ada", None, 2)
    assert first["due_at"] == first["posted_at"] == long.posted_at.isoformat()
    assert unreadable["text"] is None
    last = command(store, "show", "journey").data["waiting_posts"]["items"][-1]
    assert (last["text"], last["key"], last["due_at"]) == ("Later", "k", tomorrow.isoformat())
    page = run(store.alias, "helix_sessions", "show", "journey", "--limit", "2", "--tenant", store.tenant)
    assert "WAITING POSTS, FIRST 2 OF 3" in page.out
    assert page.out.index(" ada ") < page.out.index(" xxx")
    assert "Later" not in page.out


def test_a_page_without_waiting_posts_has_no_part_for_them(store: DatabaseStateStore) -> None:
    assert command(store, "show", "journey").data["waiting_posts"] == {"items": [], "total": 0}
    page = run(store.alias, "helix_sessions", "show", "journey", "--tenant", store.tenant)
    assert "POSTS" not in page.out
