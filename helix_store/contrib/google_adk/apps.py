from django.apps import AppConfig


class GoogleADKConfig(AppConfig):
    name = "helix_store.contrib.google_adk"
    label = "helix_store_google_adk"
    verbose_name = "Google ADK"

    def ready(self) -> None:
        from helix_store.adapters import register_conversation
        from helix_store.contrib.google_adk.conversation import CONVERSATION

        register_conversation(CONVERSATION)
