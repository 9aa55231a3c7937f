"""Connections are cut and servers killed at random chunks: what the clients hold is what is stored."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from http.client import HTTPException
from typing import Any

from tests.chat.live import Client, Site, comparable, node_modules, site
from tests.databases import CommittedDatabase

CUTS = int(os.environ.get("HELIX_CHAT_CUTS", "24"))
KILLS = int(os.environ.get("HELIX_CHAT_KILLS", "2"))
_WISHES = ("long think weather", "long agent", "think silent weather", "long state think", "differ long")
_PATIENCE_SECONDS = 90


class _Visitor(threading.Thread):
    """One client that talks, is cut off, and comes back, until it has been cut off often enough."""

    def __init__(self, running: Site, client: Client, cuts: int, seed: int) -> None:
        super().__init__()
        self._site, self._client, self._cuts = running, client, cuts
        self._random = random.Random(seed)  # noqa: S311  the seed is printed
        self.cuts = 0
        self.turns = 0
        self.wrong: list[str] = []

    def run(self) -> None:
        try:
            while self.cuts < self._cuts and not self.wrong:
                self._turn()
        except Exception as exc:  # noqa: BLE001  the test fails with it
            self.wrong.append(f"{self._client.kind}: {exc!r}")

    def _turn(self) -> None:
        self.turns += 1
        client, message_id = self._client, f"{self._client.kind}-{id(self)}-{self.turns}"
        held = client.do("say", id=message_id, text=self._random.choice(_WISHES), cut=self._cut())
        until = time.monotonic() + _PATIENCE_SECONDS
        history, has_arrived = [held["outcome"]], False
        while not _is_whole(held):
            self.cuts += 1
            assert time.monotonic() < until, f"{client.kind} never came to rest: {history[-4:]}"
            self._wait_for_the_server()
            # A message that has not arrived is sent again, as a page lets its user do.
            has_arrived = has_arrived or held["arrived"]
            how = self._random.choice(_WAYS[client.kind]) if has_arrived else "again"
            held = client.do(how, cut=self._cut() if self._random.random() < 0.5 else None)
            history.append([how, held["outcome"]])
        self._compare(held, message_id, history)

    def _cut(self) -> int:
        return self._random.randrange(1, 30)

    def _wait_for_the_server(self) -> None:
        self._stored("threads/")

    def _stored(self, path: str) -> dict[str, Any]:
        """What is stored, from a server that may be killed at any moment."""
        until = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                _, body = self._site.request("GET", path)
                found: dict[str, Any] = json.loads(body)
            except (OSError, HTTPException):
                assert time.monotonic() < until, "the server is away"
                time.sleep(0.1)
            else:
                return found

    def _compare(self, held: dict[str, Any], message_id: str, history: list[Any]) -> None:
        thread = self._stored(f"threads/{self._client.thread}/?format={self._client.kind}")
        mine, theirs = comparable(held["messages"]), comparable(thread["messages"])
        if mine != theirs:
            at = next(
                (n for n, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]),
                min(len(mine), len(theirs)),
            )
            self.wrong.append(
                f"{self._client.kind} {self._client.thread} {message_id} {thread['status']} "
                f"{len(mine)} held, {len(theirs)} stored, {json.dumps(history)[:600]}\n"
                f" held   {mine[at : at + 2]}\n stored {theirs[at : at + 2]}"
            )
        ids = [message["id"] for message in thread["messages"]]
        if len(ids) != len(set(ids)) or message_id not in ids:
            self.wrong.append(f"{self._client.thread}: doubled or lost ids in {ids}")


_WAYS = {"agui": ("again", "go_on", "come_back", "reload"), "ai": ("come_back", "come_back")}


def _is_whole(held: dict[str, Any]) -> bool:
    outcome = held["outcome"]
    return isinstance(outcome, dict) and outcome["kind"] in ("success", 200)


def test_what_clients_hold_is_what_is_stored(committed_db: CommittedDatabase) -> None:
    modules = node_modules()
    seed = int(os.environ.get("HELIX_CHAT_SEED", random.randrange(10**6)))  # noqa: S311  it is printed
    chance = random.Random(seed)  # noqa: S311
    with site(committed_db, CHAT_SECONDS="0.01") as running:
        clients = [
            Client(modules, running, kind, f"thread-{number}")
            for number, kind in enumerate(("agui", "agui", "ai"))
        ]
        visitors = [
            _Visitor(running, client, -(-CUTS // len(clients)), seed + number)
            for number, client in enumerate(clients)
        ]
        try:
            for visitor in visitors:
                visitor.start()
            kills = 0
            while any(visitor.is_alive() for visitor in visitors):
                if kills < KILLS:
                    time.sleep(chance.uniform(0.5, 4.0))  # a moment at random, no synchronisation
                    running.kill()
                    kills += 1
                    running.start()
                else:
                    for visitor in visitors:
                        visitor.join(1)
        finally:
            for client in clients:
                client.stop()
    cuts = sum(visitor.cuts for visitor in visitors)
    print(  # noqa: T201  what the campaign has done
        f"seed {seed}: {cuts} cuts, {kills} kills, {sum(visitor.turns for visitor in visitors)} turns"
    )
    wrong = [line for visitor in visitors for line in visitor.wrong]
    assert not wrong, f"seed {seed}\n" + "\n".join(wrong)
    assert cuts >= CUTS
    assert kills == KILLS
