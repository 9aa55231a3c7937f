"""The base class of the app configs for frameworks."""

from importlib import import_module

from django.apps import AppConfig


class FrameworkConfig(AppConfig):
    """An app that registers the ``TABLES`` and the ``CONVERSATION`` of its module ``catalogue``."""

    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from helix_store.catalogue import register_conversation, register_table

        catalogue = import_module(f"{self.name}.catalogue")
        for table in getattr(catalogue, "TABLES", ()):
            register_table(table)
        if conversation := getattr(catalogue, "CONVERSATION", None):
            register_conversation(conversation)
