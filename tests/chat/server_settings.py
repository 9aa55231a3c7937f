"""Settings of a real server with the chat of `tests.chat.site`."""

from __future__ import annotations

from typing import Any

from example_project import settings as example

globals().update({name: value for name, value in vars(example).items() if name.isupper()})

INSTALLED_APPS = [
    *(app for app in example.INSTALLED_APPS if app != "helix_store.contrib.chat"),
    "helix_store.contrib.chat",
]
ROOT_URLCONF = "tests.chat.site"
MIDDLEWARE = [each for each in example.MIDDLEWARE if "csrf" not in each]
DEBUG = False
SECRET_KEY = "for-tests-only"
ALLOWED_HOSTS = ["*"]
HELIX_STORE: dict[str, Any] = {
    "DEFAULT_LOCK_TTL_MS": example.env.int("CHAT_LOCK_MS", default=1_500),
    "CHAT_THREADS": example.env.int("CHAT_THREADS", default=8),
}
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"stream": {"class": "logging.StreamHandler"}},
    "root": {"handlers": ["stream"], "level": "INFO"},
}
