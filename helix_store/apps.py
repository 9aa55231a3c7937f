from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class HelixStoreConfig(AppConfig):
    name = "helix_store"
    verbose_name = _("Agent sessions")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from helix_store import checks  # noqa: F401  registers the system checks
        from helix_store.engine.connections import watch_requests
        from helix_store.engine.forks import watch_connections

        watch_requests()
        watch_connections()
