"""The sample that the examples of ``--help`` work on: session ``trip-1`` of ``user-1`` in the tenant ""."""

from __future__ import annotations

from typing import Any, Final

from asgiref.sync import async_to_sync

from helix_store.core import moments
from helix_store.core.validation import datetime_to_milliseconds
from helix_store.stores import DatabaseStateStore, DatabaseStreamManager, DatabaseUsageStore

__all__ = ["CALL_ID", "SAMPLE_ID", "write_sample"]

SAMPLE_ID: Final = "trip-1"
CALL_ID: Final = "call-1"

_TURNS: Final[list[list[dict[str, Any]]]] = [
    [
        {"role": "system", "content": "You are a travel agent."},
        {"role": "user", "content": "Find me a flight from Osaka to São Paulo on Friday."},
    ],
    [
        {
            "role": "assistant",
            "thinking": "Two connections are possible; look both up.",
            "content": "I look for flights.",
            "tool_calls": [
                {
                    "id": CALL_ID,
                    "type": "function",
                    "function": {"name": "find_flights", "arguments": '{"from": "KIX", "to": "GRU"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": CALL_ID, "content": '[{"flight": "JL 5", "price": 1200}]'},
    ],
    [{"role": "assistant", "content": "JL 5 costs $1,200. Shall I book it?"}],
]


def write_sample(using: str | None = None, *, tenant: str = "", session_id: str = SAMPLE_ID) -> None:
    """A session with three steps, a run, a sub-session, a remote one, a waiting call, usage and a stream."""
    now = datetime_to_milliseconds(moments.now())
    store = DatabaseStateStore(using, tenant=tenant)
    store.create_session(
        session_id,
        agent_type="travel",
        user_id="user-1",
        title="A trip to São Paulo",
        tags=["demo"],
        metadata={"channel": "web"},
    )
    run = store.start_run(session_id, "run-1")
    for number, messages in enumerate(_TURNS, start=1):
        state = store.load_state(session_id)
        assert state is not None
        state.custom_state = {"step": number, "flights": ["JL 5"][: number - 1]}
        step = {"step_id": f"step-{number}", "step_count": number, "stream_sequence": number}
        store.save_state_and_promote_staging(session_id, state, messages, step, run_id=run.run_id)
    store.create_session(f"{session_id}-hotels", agent_type="hotels", parent_session_id=session_id)
    store.add_sub_session_refs(
        session_id,
        [
            {
                "sub_session_id": f"{session_id}-hotels",
                "agent_type": "hotels",
                "parent_tool_call_id": "call-2",
            },
            {
                "sub_session_id": f"{session_id}-visa",
                "agent_type": "visa",
                "location": "remote",
                "remote": {"url": "https://agents.example/visa"},
            },
        ],
    )
    store.add_pending_tool_calls(session_id, {"call-3": {"tool_name": "book", "deadline": now + 10**12}})
    DatabaseUsageStore(using, tenant=tenant).record_entry(
        {
            "kind": "tokens",
            "session_id": session_id,
            "step_count": 1,
            "timestamp": now,
            "source": {"type": "agent", "name": "travel"},
            "model": "model-1",
            "tokens": {"prompt": 900, "completion": 100, "total": 1000},
            "cost_usd": "0.0125",
        }
    )
    async_to_sync(_write_stream)(DatabaseStreamManager(using, tenant=tenant), session_id)


async def _write_stream(streams: DatabaseStreamManager, stream_id: str) -> None:
    """A stream that has ended, so that a command that follows it ends too."""
    async with await streams.create_writer(stream_id, "run-1", "travel") as writer:
        await writer.write_many([{"type": "text", "text": f"part {number}"} for number in range(1, 4)])
    await streams.end_stream(stream_id)
