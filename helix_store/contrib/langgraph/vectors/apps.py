from __future__ import annotations

from django.apps import AppConfig


class LangGraphVectorsConfig(AppConfig):
    name = "helix_store.contrib.langgraph.vectors"
    label = "helix_store_langgraph_vectors"
    verbose_name = "LangGraph vectors"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from helix_store.contrib.langgraph.vectors.tables import register_tables

        register_tables()
