from django.apps import AppConfig
from django.db.models.signals import pre_migrate
from django.utils.translation import gettext_lazy as _


class HelixStoreConfig(AppConfig):
    name = "helix_store"
    verbose_name = _("Agent sessions")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from helix_store import (
            budgets,
            checks,  # noqa: F401  registers the system checks
            items,
            locks,
        )
        from helix_store.catalogue import register_table
        from helix_store.engine.threads import watch_connections, watch_requests
        from helix_store.migrations._plans import prepare_plan
        from helix_store.sessions import heads as sessions
        from helix_store.streams import chunks as streams
        from helix_store.usage import ledger as usage

        # The models are listed in the order in which writers lock their rows.
        for app in (sessions, locks, budgets, streams, items, usage):
            for table in app.TABLES:
                register_table(table)
        watch_requests()
        watch_connections()
        pre_migrate.connect(prepare_plan, sender=self)
