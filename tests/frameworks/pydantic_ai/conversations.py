"""Conversations for the tests, and what the database holds of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asgiref.sync import async_to_sync
from pydantic_ai.conversation import Conversation
from pydantic_ai.messages import ModelMessage, ModelRequest, ModelResponse, TextPart, UserPromptPart
from pydantic_ai.usage import RequestUsage, RunUsage

from helix_store.contrib.pydantic_ai import DjangoConversationStore
from helix_store.contrib.pydantic_ai.models import ConversationEntry, ConversationFamily
from tests.databases import CommittedDatabase

__all__ = ["entry_ids", "families", "forked", "history", "saved", "say", "store_of", "turn"]


def store_of(database: CommittedDatabase) -> DjangoConversationStore:
    return DjangoConversationStore(database.alias, tenant=database.tenant)


def say(text: str) -> ModelMessage:
    return ModelRequest(parts=[UserPromptPart(content=text)])


def turn(conversation: Conversation, text: str, *, model: str = "fast", tokens: int = 5) -> None:
    """A question and its answer, with their usage, as a run adds them."""
    usage = RequestUsage(input_tokens=tokens, output_tokens=1)
    answer = ModelResponse(parts=[TextPart(content=f"answer to {text}")], usage=usage, model_name=model)
    conversation.messages += [say(text), answer]
    conversation.usage += RunUsage(requests=1, input_tokens=tokens, output_tokens=1)


def saved(database: CommittedDatabase, name: str, *texts: str, scope: str | None = None) -> Conversation:
    """A new conversation with a turn for each text."""
    conversation = Conversation(conversation_id=name)
    for text in texts:
        turn(conversation, text)
    async_to_sync(store_of(database).save)(conversation, scope=scope)
    return conversation


def forked(database: CommittedDatabase, name: str, new: str, *texts: str, **point: Any) -> Conversation:
    """A fork with further turns."""
    fork = async_to_sync(store_of(database).fork)(name, new_conversation_id=new, **point)
    for text in texts:
        turn(fork, text)
    if texts:
        async_to_sync(store_of(database).save)(fork)
    return fork


def history(database: CommittedDatabase, name: str) -> Sequence[str] | None:
    """The ids of a conversation's entries, the oldest first."""
    entries = async_to_sync(store_of(database).load_entries)(name)
    return None if entries is None else [entry.id for entry in entries]


def entry_ids(database: CommittedDatabase) -> set[str]:
    """Every stored entry of the tenant."""
    rows = ConversationEntry.objects.using(database.alias).filter(tenant=database.tenant)
    return set(rows.values_list("entry_id", flat=True))


def families(database: CommittedDatabase) -> int:
    return ConversationFamily.objects.using(database.alias).filter(tenant=database.tenant).count()
