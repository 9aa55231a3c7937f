"""The base class of the app configs for frameworks."""

from importlib import import_module

from django.apps import AppConfig
from django.utils.module_loading import module_has_submodule


class FrameworkConfig(AppConfig):
    """An app that registers the ``TABLES`` of its module ``tables`` and the ``CONVERSATION`` of its module
    ``conversation``, if it has these modules.
    """

    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from helix_store.catalogue import register_conversation, register_table

        if module_has_submodule(self.module, "tables"):
            for table in import_module(f"{self.name}.tables").TABLES:
                register_table(table)
        if module_has_submodule(self.module, "conversation"):
            register_conversation(import_module(f"{self.name}.conversation").CONVERSATION)
