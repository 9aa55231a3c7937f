from django.apps import AppConfig


class NotebookConfig(AppConfig):
    name = "tests.adapters.third_party"
    label = "notebook"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from tests.adapters.third_party.tables import register

        register()
