from django.apps import AppConfig


class NotebookConfig(AppConfig):
    name = "tests.adapters.third_party"
    label = "notebook"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from helix_store.adapters import register_conversation
        from tests.adapters.third_party.conversation import NotebookConversation
        from tests.adapters.third_party.tables import register

        register()
        register_conversation(NotebookConversation())
