from helix_store.contrib import _frameworks


class OpenAIAgentsConfig(_frameworks.FrameworkConfig):
    name = "helix_store.contrib.openai_agents"
    label = "helix_store_openai_agents"
    verbose_name = "OpenAI Agents"

    def ready(self) -> None:
        from helix_store.contrib.openai_agents.catalogue import SQLAlchemySessionSource, SQLiteSessionSource
        from helix_store.transfer.sources import register_source

        super().ready()
        register_source("openai-agents-sqlite", SQLiteSessionSource)
        register_source("openai-agents-postgres", SQLAlchemySessionSource)
