from __future__ import annotations

from django.apps import AppConfig


class LangGraphConfig(AppConfig):
    name = "helix_store.contrib.langgraph"
    label = "helix_store_langgraph"
    verbose_name = "LangGraph"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from helix_store.catalogue import register_conversation
        from helix_store.contrib.langgraph.conversation import CONVERSATION
        from helix_store.contrib.langgraph.sources import register_sources
        from helix_store.contrib.langgraph.tables import register_tables

        register_tables()
        register_conversation(CONVERSATION)
        register_sources()
