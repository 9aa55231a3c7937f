from django.apps import AppConfig


class LangGraphConfig(AppConfig):
    name = "helix_store.contrib.langgraph"
    label = "helix_store_langgraph"
    verbose_name = "LangGraph"
    default_auto_field = "django.db.models.BigAutoField"
