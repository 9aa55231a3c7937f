from django.apps import AppConfig


class AgentFrameworkConfig(AppConfig):
    name = "helix_store.contrib.agent_framework"
    label = "helix_store_agent_framework"
    verbose_name = "Microsoft Agent Framework"

    def ready(self) -> None:
        from helix_store.adapters import register_conversation
        from helix_store.contrib.agent_framework.conversation import CONVERSATION

        register_conversation(CONVERSATION)
