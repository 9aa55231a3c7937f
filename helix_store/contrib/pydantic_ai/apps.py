from django.apps import AppConfig


class PydanticAIConfig(AppConfig):
    name = "helix_store.contrib.pydantic_ai"
    label = "helix_store_pydantic_ai"
    verbose_name = "Pydantic AI"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from helix_store.catalogue import register_conversation
        from helix_store.contrib.pydantic_ai.conversation import CONVERSATION
        from helix_store.contrib.pydantic_ai.tables import register_tables

        register_tables()
        register_conversation(CONVERSATION)
