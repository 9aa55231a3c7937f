from django.apps import AppConfig


class ClaudeAgentConfig(AppConfig):
    name = "helix_store.contrib.claude_agent"
    label = "helix_store_claude_agent"
    verbose_name = "Claude Agent SDK"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from helix_store.catalogue import AppTable, register_conversation, register_table
        from helix_store.contrib.claude_agent.conversation import CONVERSATION
        from helix_store.contrib.claude_agent.keys import faults
        from helix_store.contrib.claude_agent.models import ClaudeSession

        register_table(AppTable(ClaudeSession, record="claude_session", check=faults))
        register_conversation(CONVERSATION)
