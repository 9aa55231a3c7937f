"""What posters and workers were told, compared with the posts and histories that are stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import combinations, pairwise
from typing import Any, NamedTuple

from helix_store.core.posts import Post
from helix_store.core.types import Message
from tests.faults.posting import Accepted, Broke, Committed, Ending, Refused, Told

__all__ = ["Stored", "faults_of"]


class Stored(NamedTuple):
    """A session after its end."""

    status: str
    history: list[Message]
    posts: list[Post]


def faults_of(told: Iterable[Told], stored: Mapping[str, Stored]) -> list[str]:
    told = list(told)
    faults = [f"{each.session}: {each.error}" for each in told if isinstance(each, Broke)]
    faults += _faults_of_ends(told)
    for session, found in stored.items():
        own = [each for each in told if each.session == session]
        posted = {each.post_id: each.text for each in own if isinstance(each, Accepted)}
        steps = [each.text for each in own if isinstance(each, Committed)]
        found_faults = [
            *_faults_of_posts(posted, found),
            *_faults_of_order(found.posts),
            *_faults_of_history(found, [*posted.values()], steps),
        ]
        faults += [f"{session}: {fault}" for fault in found_faults]
    return faults


def _faults_of_ends(told: Iterable[Told]) -> Iterable[str]:
    """A refusal before any end began, or a post that was accepted although it began after the end."""
    begun: dict[str, float] = {}
    ended: dict[str, float] = {}
    for each in told:
        if isinstance(each, Ending):
            begun[each.session] = min(each.at, begun.get(each.session, each.at))
        elif isinstance(each, Committed) and each.has_ended:
            ended[each.session] = each.at
    for each in told:
        if isinstance(each, Refused) and (
            each.at < begun.get(each.session, float("inf")) or each.status != each.stored
        ):
            yield f"{each}: refused before the session had ended"
        if isinstance(each, Accepted) and each.begun > ended.get(each.session, float("inf")):
            yield f"{each}: accepted after the end"


def _faults_of_posts(accepted: Mapping[str, str], found: Stored) -> Iterable[str]:
    rows = {each.post_id: each for each in found.posts}
    if rows.keys() != accepted.keys():
        yield f"accepted {sorted(accepted)}, but stored {sorted(rows)}"
    for post_id in rows.keys() & accepted.keys():
        row, text = rows[post_id], accepted[post_id]
        if row.state == "received":
            position = row.position
            if position is None or found.history[position : position + 1] != [_message(text)]:
                yield f"{text} is not at its position {position}"
        elif found.status != "failed":
            yield f"{text} is {row.state}, and the session is {found.status}"


def _faults_of_order(posts: Iterable[Post]) -> Iterable[str]:
    """A reception out of order, or one that skipped a post that was already due."""
    received = sorted((each for each in posts if each.state == "received"), key=lambda each: each.sequence)
    expected = sorted(received, key=lambda each: (each.received_at, _due(each), each.sequence))
    positions = [each.position for each in expected]
    if positions != sorted(positions, key=lambda each: each or 0):
        yield f"received out of order: {positions}"
    for earlier, later in combinations(received, 2):
        if _due(earlier) <= _due(later) and (earlier.position or 0) >= (later.position or 0):
            yield f"{earlier.key} was passed by {later.key}"


def _faults_of_history(found: Stored, accepted: list[str], steps: list[str]) -> Iterable[str]:
    counts = Counter(message["content"] for message in found.history if message["role"] != "tool")
    yield from (f"{text} is in the history {n} times" for text, n in counts.items() if n > 1)
    yield from (f"the step {text} is lost" for text in steps if counts[text] != 1)
    users = {message["content"] for message in found.history if message["role"] == "user"}
    yield from (f"{text} was never accepted" for text in users.difference(accepted))
    for message, following in pairwise(found.history):
        if message.get("tool_calls") and following["role"] != "tool":
            yield f"{following['content']} came between a call and its result"
    if found.status == "completed" and found.history[-1]["role"] != "assistant":
        yield f"{found.history[-1]['content']} was never answered"


def _message(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _due(post: Post) -> Any:
    return post.posted_at if post.not_before is None else post.not_before
