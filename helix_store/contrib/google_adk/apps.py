from helix_store.contrib import _frameworks


class GoogleADKConfig(_frameworks.FrameworkConfig):
    name = "helix_store.contrib.google_adk"
    label = "helix_store_google_adk"
    verbose_name = "Google ADK"

    def ready(self) -> None:
        from helix_store.contrib.google_adk.catalogue import PostgresADKSource, SqliteADKSource
        from helix_store.transfer.sources import register_source

        super().ready()
        register_source("google-adk-postgres", PostgresADKSource)
        register_source("google-adk-sqlite", SqliteADKSource)
