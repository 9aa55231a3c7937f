"""Stored text never runs: payloads in every field, on every section, in a browser with a strict policy."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, Final

from asgiref.sync import async_to_sync

from helix_store.admin.sections import SECTIONS
from helix_store.core.types import RunStatus, StepInfo
from helix_store.models import Session
from helix_store.stores import DatabaseStateStore, DatabaseStreamManager, DatabaseUsageStore
from tests.admin.test_clicking import _sign_in
from tests.asgi_server import serving
from tests.browser import chromium
from tests.databases import CommittedDatabase, delete_all_rows

_SCRIPT: Final = "window.ran=1"
_TAGS: Final = (
    "img src=x onerror",
    "svg onload",
    "body onload",
    "details open ontoggle",
    "input autofocus onfocus",
)
_MORE_TAGS: Final = (
    "video src=x onerror",
    "audio src=x onerror",
    "iframe onload",
    "object data=x onerror",
    "marquee onstart",
)
_BREAKS: Final = (
    "",
    '"',
    "'",
    '">',
    "'>",
    "-->",
    "]]>",
    "</pre>",
    "</details>",
    "</script>",
    "</title>",
    "</textarea>",
    "\n",
    "`",
    "</svg>",
    "<!--",
)

PAYLOADS: Final = [
    *(f"{before}<{tag}={_SCRIPT}>" for before in _BREAKS for tag in (*_TAGS, *_MORE_TAGS)),
    *(f"{before}<script>{_SCRIPT}</script>" for before in _BREAKS),
    *(f'{before} onmouseover="{_SCRIPT}" autofocus onfocus="{_SCRIPT}" x=' for before in _BREAKS),
    *(f"{before}<a href=javascript:{_SCRIPT}>x</a>" for before in _BREAKS),
    f"javascript:{_SCRIPT}",
    f"data:text/html,<script>{_SCRIPT}</script>",
    "{{ 7|add:7 }}{% now 'Y' %}{% include 'admin/base.html' %}",
    "<style>*{display:none}</style><link rel=stylesheet href=//x.example><base href=//x.example>",
    "<form action=//x.example><button>",
    "<meta http-equiv=refresh content=0;url=//x.example>",
]
"""More than 200 payloads."""

FOUND: Final = """
return {
  ran: window.ran === 1,
  elements: [...document.querySelectorAll('#content *')].filter((each) =>
    /^(IMG|IFRAME|OBJECT|VIDEO|AUDIO|MARQUEE|STYLE|LINK|BASE|META)$/.test(each.tagName)
    || each.getAttributeNames().some((name) => name.startsWith('on'))
    || (each.tagName === 'SCRIPT' && !/\\/static\\/helix_store\\/live(_page)?\\.js$/.test(each.src))
    || /^javascript:/i.test(each.getAttribute('href') ?? '')).map((each) => each.outerHTML.slice(0, 200)),
  text: document.body.innerText,
}
"""


def _write(alias: str) -> Session:
    """A session with all payloads as messages, tools, keys, values, ids and words."""
    store = DatabaseStateStore(alias)
    joined = " ".join(PAYLOADS)[:8_000]
    state = store.create_session(
        PAYLOADS[0],
        agent_type=PAYLOADS[1],
        user_id=PAYLOADS[2],
        title=joined[:3_000],
        tags=PAYLOADS[:20],
        metadata={payload[:100]: payload for payload in PAYLOADS[:20]},
        directory=PAYLOADS[3],
    )
    run = store.start_run(state.session_id)
    streams = DatabaseStreamManager(alias)
    async_to_sync(streams.create_writer)(state.session_id, PAYLOADS[4].strip(), "agent")
    streams.write_sync(
        state.session_id, [{"type": payload.strip() or "x", "delta": payload} for payload in PAYLOADS]
    )
    usage = DatabaseUsageStore(alias)
    for payload in PAYLOADS[:40]:
        usage.record_entry(
            {
                "kind": "tokens",
                "session_id": state.session_id,
                "step_count": 1,
                "timestamp": 1,
                "source": {"type": "agent", "name": "a"},
                "model": payload.replace("\n", " "),
                "tokens": {"total": 1},
            }
        )
    messages: list[dict[str, Any]] = []
    for number, payload in enumerate(PAYLOADS):
        call = {"id": str(number), "type": "function", "function": {"name": payload, "arguments": payload}}
        messages.append(
            {
                "role": payload.replace("\n", " "),
                "thinking": payload,
                "content": payload,
                "tool_calls": [call],
            }
        )
        messages.append({"role": "tool", "tool_call_id": str(number), "content": payload})
    state.custom_state = {payload: [payload] for payload in PAYLOADS}
    state.tracing_context = {"api_key": PAYLOADS[0]}
    state.output = state.error = PAYLOADS
    store.save_state_and_promote_staging(
        state.session_id, state, messages, StepInfo(PAYLOADS[5], 1), run_id=run.run_id
    )
    changed = {**state.custom_state, **{f"{payload}~": payload for payload in PAYLOADS}}
    store.merge_custom_state(state.session_id, changed)
    store.stage_changes(
        state.session_id, PAYLOADS[6], {"tool_call_id": PAYLOADS[7], "merge_changes": {joined: 1}}
    )
    store.add_sub_session_refs(
        state.session_id,
        [{"sub_session_id": p, "agent_type": p, "status": p} for p in PAYLOADS[:40] if "\n" not in p],
    )
    store.request_interrupt(state.session_id, reason=joined)
    calls = {p: {"tool_name": p, "input": {p: p}, "approval_id": p} for p in PAYLOADS[:45] if "\n" not in p}
    store.suspend(
        state.session_id, kind=RunStatus.SUSPENDED_CLIENT_TOOL, context={joined: joined}, pending=calls
    )
    return Session.objects.using(alias).get(tenant="", session_id=state.session_id)


def test_no_payload_runs_or_becomes_an_element_on_any_section(
    empty_db: CommittedDatabase, security_counts: Counter[str]
) -> None:
    assert len(set(PAYLOADS)) >= 200
    session = _write(empty_db.alias)
    (checkpoint,) = DatabaseStateStore(empty_db.alias).list_checkpoints(session.session_id).items
    with serving(empty_db, settings="tests.strict_settings") as server, chromium() as browser:
        _sign_in(browser, server.url, empty_db)
        browser.complaints()
        base = f"{server.url}/admin/helix_store/session/{session.pk}"
        compare = f"{base}/change/?section=checkpoints&a={checkpoint.checkpoint_id}&b=current"
        starts = range(1, 2 * len(PAYLOADS), 40)
        addresses = [
            *(f"{base}/change/?section={section.name}" for section in SECTIONS),
            *(f"{base}/change/?section=conversation&start={start}" for start in starts),
            *(f"{base}/change/?section=stream&before={start}" for start in range(60, len(PAYLOADS), 60)),
            f"{base}/change/?section=state&q=%3C&at=%22%3E%3Cimg",
            re.sub(r"[<>\"' ]", lambda match: f"%{ord(match[0]):02x}", compare),
            f"{base}/operation/delete-session/",
            f"{base}/history/",
        ]
        for address in addresses:
            browser.open(address)
            found = browser.run(FOUND)
            assert found["ran"] is False, address
            assert found["elements"] == [], address
            assert "<img src=x onerror" in found["text"] or "history" in address or "usage" in address, (
                address
            )
            assert browser.complaints() == [], address
            security_counts["payloads on sections in a browser"] += len(PAYLOADS)
    delete_all_rows(empty_db.alias)


def test_chunks_are_shown_as_they_are_written_and_never_run(empty_db: CommittedDatabase) -> None:
    store, streams = DatabaseStateStore(empty_db.alias), DatabaseStreamManager(empty_db.alias)
    store.create_session("s", agent_type="a")
    async_to_sync(streams.create_writer)("s", "run", "agent")
    streams.write_sync("s", [{"type": "text_delta", "delta": "before, "}])
    session = Session.objects.using(empty_db.alias).get(tenant="", session_id="s")
    with serving(empty_db, settings="tests.strict_settings") as server, chromium() as browser:
        _sign_in(browser, server.url, empty_db)
        browser.complaints()
        browser.open(f"{server.url}/admin/helix_store/session/{session.pk}/change/?section=stream")
        browser.until("#helix-live", contains="live")
        streams.write_sync("s", [{"type": "text_delta", "delta": "after"}])
        browser.until("#helix-chunks", contains="before, after")
        streams.write_sync("s", [{"type": payload.strip(), "delta": payload} for payload in PAYLOADS])
        async_to_sync(streams.end_stream)("s", {})
        browser.until("#helix-live", contains="ended")
        found = browser.run(FOUND)
        assert found["ran"] is False
        assert found["elements"] == []
        assert PAYLOADS[0] in found["text"]
        assert browser.complaints() == []
    delete_all_rows(empty_db.alias)
