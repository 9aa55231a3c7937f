from helix_store.contrib import _apps


class GoogleADKConfig(_apps.FrameworkConfig):
    name = "helix_store.contrib.google_adk"
    label = "helix_store_google_adk"
    verbose_name = "Google ADK"
