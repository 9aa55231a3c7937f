from django.apps import AppConfig


class StrandsConfig(AppConfig):
    name = "helix_store.contrib.strands"
    label = "helix_store_strands"
    verbose_name = "Strands Agents"

    def ready(self) -> None:
        from helix_store.catalogue import register_conversation
        from helix_store.contrib.strands.conversation import CONVERSATION

        register_conversation(CONVERSATION)
