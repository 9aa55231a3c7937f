from django.apps import AppConfig


class ChatConfig(AppConfig):
    """The app of the chat: it drives threads that have received a message or an answer, or that can go on."""

    name = "helix_store.contrib.chat"
    label = "helix_store_chat"
    verbose_name = "Chat"

    def ready(self) -> None:
        from helix_store.contrib.chat.driver import run_thread
        from helix_store.signals import session_answered, session_posted, session_ready

        for signal in (session_posted, session_answered, session_ready):
            signal.connect(run_thread, dispatch_uid="helix_store.contrib.chat")
