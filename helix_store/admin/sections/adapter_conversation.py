"""The conversation that an adapter keeps with a session, on the pages of the store's own messages."""

from __future__ import annotations

from typing import Any

from helix_store.admin.elements import identifier, link, printable
from helix_store.admin.sections.blocks import Block, block
from helix_store.admin.sections.section import SessionView
from helix_store.admin.times import stamp
from helix_store.catalogue import Conversation, ConversationPage, ConversationStep
from helix_store.core.transcript import ConversationMessage, paired

__all__ = ["adapter_context", "adapter_page"]


def adapter_page(view: SessionView, conversation: Conversation, *, limit: int) -> ConversationPage | None:
    """Return the page that the address names, by default the newest one."""
    start, thread = view.number("start"), view.request.GET.get("thread")
    first = None if start is None else max(1, start)
    return conversation.page(view.db, view.session.pk, first=first, limit=limit, thread=thread)


def adapter_context(view: SessionView, name: str, page: ConversationPage, *, limit: int) -> dict[str, Any]:
    first = page.messages[0].number if page.messages else 1
    last = page.messages[-1].number if page.messages else 0

    def url(**query: Any) -> str:
        return view.url(of=name, thread=page.thread or None, **query)

    return {
        "blocks": _blocks(view, page.messages),
        "first": first,
        "last": last,
        "total": f"{page.total}+" if page.is_partial else page.total,
        "oldest_url": url(start=1) if first > 1 else "",
        "older_url": url(start=max(1, first - limit)) if first > 1 else "",
        "newer_url": url(start=last + 1) if last < page.total else "",
        "newest_url": url() if last < page.total else "",
        "threads": [
            {
                "name": printable(each) or "-",
                "url": "" if each == page.thread else view.url(of=name, thread=each),
            }
            for each in page.threads
        ],
        "path": [_step(view, step) for step in page.path],
    }


def _blocks(view: SessionView, messages: tuple[ConversationMessage, ...]) -> list[Block]:
    readable = [(each.number, each.role, each.parts) for each in messages if each.parts is not None]
    spoken = {turn.sequence: turn for turn in paired(readable)}
    times = {each.number: each.at for each in messages}
    blocks: list[Block] = []
    shown_step = None
    for message in messages:
        if message.parts is not None and message.number not in spoken:
            continue
        turn = spoken.get(message.number)
        is_new = message.step is not None and message.step != shown_step
        shown_step = message.step
        blocks.append(
            block(
                message.number,
                message.role,
                None if turn is None else turn.parts,
                times,
                url="" if message.row is None else view.page.page_url(*message.row),
                is_cut=message.is_cut,
                step={"step_count": message.step, "at": _stamp(message.at)} if is_new else None,
            )
        )
    return blocks


def _step(view: SessionView, step: ConversationStep) -> dict[str, Any]:
    url = "" if step.row is None else view.page.page_url(*step.row)
    return {
        "id": link(url, identifier(step.step_id)),
        "name": printable(step.name),
        "number": step.step,
        "count": step.count,
        "at": _stamp(step.at),
    }


def _stamp(at: Any) -> Any:
    return "" if at is None else stamp(at)
