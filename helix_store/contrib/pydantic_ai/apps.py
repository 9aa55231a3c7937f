from django.apps import AppConfig


class PydanticAIConfig(AppConfig):
    name = "helix_store.contrib.pydantic_ai"
    label = "helix_store_pydantic_ai"
    verbose_name = "Pydantic AI"
    default_auto_field = "django.db.models.BigAutoField"
