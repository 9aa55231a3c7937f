from django.apps import AppConfig
from django.db.models.signals import pre_migrate
from django.utils.translation import gettext_lazy as _


class HelixStoreConfig(AppConfig):
    name = "helix_store"
    verbose_name = _("Agent sessions")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from helix_store import checks  # noqa: F401  registers the system checks
        from helix_store.budgets import tables as budgets
        from helix_store.catalogue import register_table
        from helix_store.engine.connections import watch_requests
        from helix_store.engine.forks import watch_connections
        from helix_store.items import tables as items
        from helix_store.locks import tables as locks
        from helix_store.migrations._plans import prepare_plan
        from helix_store.sessions import tables as sessions
        from helix_store.streams import tables as streams
        from helix_store.usage import tables as usage

        # The models are listed in the order in which writers lock their rows.
        for app in (sessions, locks, budgets, streams, items, usage):
            for table in app.TABLES:
                register_table(table)
        watch_requests()
        watch_connections()
        pre_migrate.connect(prepare_plan, sender=self)
