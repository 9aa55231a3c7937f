from django.apps import AppConfig


class HelixStoreConfig(AppConfig):
    name = "helix_store"
    verbose_name = "Agent sessions"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from helix_store import checks  # noqa: F401  registers the system checks
        from helix_store.engine.connections import watch_requests

        watch_requests()
