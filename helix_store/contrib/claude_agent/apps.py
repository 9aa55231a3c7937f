from django.apps import AppConfig


class ClaudeAgentConfig(AppConfig):
    name = "helix_store.contrib.claude_agent"
    label = "helix_store_claude_agent"
    verbose_name = "Claude Agent SDK"
    default_auto_field = "django.db.models.BigAutoField"
