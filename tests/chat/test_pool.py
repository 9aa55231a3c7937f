"""The pool that drives the chats of a process."""

from __future__ import annotations

import threading
import time

from django.test import override_settings

from helix_store.contrib.chat.driver import Pool, run_thread


def _until(condition: object, what: str) -> None:
    until = time.monotonic() + 20
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < until, what
        threading.Event().wait(0.01)


def test_a_pool_has_no_more_threads_than_its_setting_and_none_without_work() -> None:
    pool, at_once, most, done = Pool(idle_seconds=0.05), [0], [0], []
    guard, may_end = threading.Lock(), threading.Event()

    def work() -> None:
        with guard:
            at_once[0] += 1
            most[0] = max(most[0], at_once[0])
        may_end.wait(20)
        with guard:
            at_once[0] -= 1
            done.append(1)

    assert pool.threads == 0
    with override_settings(HELIX_STORE={"CHAT_THREADS": 3}):
        for key in range(10):
            pool.submit((key,), work)
        _until(lambda: at_once[0] == 3, "three threads work")
        may_end.set()
        _until(lambda: len(done) == 10, "all is done")
    assert most[0] == 3
    _until(lambda: pool.threads == 0, "the threads end without work")


def test_what_waits_already_is_not_submitted_twice_and_an_error_ends_no_thread() -> None:
    pool, runs, may_begin = Pool(idle_seconds=0.05), [], threading.Event()

    def fail() -> None:
        may_begin.wait(20)
        raise ValueError("expected by this test")

    with override_settings(HELIX_STORE={"CHAT_THREADS": 1}):
        pool.submit(("first",), fail)
        for _ in range(3):
            pool.submit(("second",), lambda: runs.append(1))
        may_begin.set()
        _until(lambda: pool.threads == 0, "the thread ends")
    assert runs == [1]


def test_sessions_that_are_no_threads_are_left_alone() -> None:
    for session_id in ("trip-1", "chat-1", f"chat-{'0' * 10}-{'0' * 40}"):
        run_thread(session_id=session_id, tenant="", using=None)
