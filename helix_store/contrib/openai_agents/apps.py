from django.apps import AppConfig


class OpenAIAgentsConfig(AppConfig):
    name = "helix_store.contrib.openai_agents"
    label = "helix_store_openai_agents"
    verbose_name = "OpenAI Agents"
    default_auto_field = "django.db.models.BigAutoField"
