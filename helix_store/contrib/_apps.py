"""The base of the apps of frameworks."""

from importlib import import_module

from django.apps import AppConfig
from django.utils.module_loading import module_has_submodule


class FrameworkConfig(AppConfig):
    """The app of a framework: it registers the ``CONVERSATION`` of its module ``conversation``, and the
    ``TABLES`` of its module ``tables`` if it has tables.
    """

    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from helix_store.catalogue import register_conversation, register_table

        if module_has_submodule(self.module, "tables"):
            for table in import_module(f"{self.name}.tables").TABLES:
                register_table(table)
        register_conversation(import_module(f"{self.name}.conversation").CONVERSATION)
