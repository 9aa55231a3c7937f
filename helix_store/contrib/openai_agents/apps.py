from django.apps import AppConfig


class OpenAIAgentsConfig(AppConfig):
    name = "helix_store.contrib.openai_agents"
    label = "helix_store_openai_agents"
    verbose_name = "OpenAI Agents"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from helix_store.catalogue import AppTable, register_conversation, register_table
        from helix_store.contrib.openai_agents.conversation import CONVERSATION
        from helix_store.contrib.openai_agents.models import OpenAIRunState
        from helix_store.contrib.openai_agents.source import SQLiteSessionSource
        from helix_store.transfer.sources import register_source

        register_table(
            AppTable(
                OpenAIRunState,
                record="openai_run_state",
                order=("state_id",),
                not_exported={
                    "claim_owner": "The claim belongs to a process that works on the other database.",
                    "claim_expires_at": "The claim belongs to a process that works on the other database.",
                },
            )
        )
        register_conversation(CONVERSATION)
        register_source("openai-agents-sqlite", SQLiteSessionSource)
