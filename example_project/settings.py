"""Settings of the example project.

``DATABASE_URL``, ``SECRET_KEY``, ``DEBUG``, ``ALLOWED_HOSTS`` and ``CARD_SERVICE`` come from the environment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import environ

BASE_DIR = Path(__file__).resolve().parent.parent

env = environ.Env()

DEBUG: bool = env.bool("DEBUG", default=True)
# Without DEBUG there is no default: a known key would let anyone sign a session cookie.
SECRET_KEY: str = env.str("SECRET_KEY", default="for-development-only" if DEBUG else environ.Env.NOTSET)
ALLOWED_HOSTS: list[str] = env.list("ALLOWED_HOSTS", default=["localhost", "127.0.0.1"])

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "helix_store",
    "helix_store.contrib.langgraph",
    "helix_store.contrib.openai_agents",
    "helix_store.contrib.claude_agent",
    "helix_store.contrib.pydantic_ai",
    "helix_store.contrib.strands",
    "helix_store.contrib.google_adk",
    "helix_store.contrib.agent_framework",
    "helix_store.contrib.chat",
    "example_project",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

ROOT_URLCONF = "example_project.urls"
ASGI_APPLICATION = "example_project.asgi.application"
WSGI_APPLICATION = "example_project.wsgi.application"

# IMMEDIATE takes the write lock when a transaction starts: a transaction that reads first and requests the
# lock later is refused at once under load, regardless of the timeout. FULL keeps a commit after a power
# failure.
SQLITE_OPTIONS: dict[str, Any] = {
    "timeout": 20,
    "transaction_mode": "IMMEDIATE",
    "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;",
}

# Not in the URL, where django-environ reads "?pool=true" as the text "true". A pool instead of CONN_MAX_AGE,
# because under ASGI a persistent connection would outlive its request.
POSTGRES_OPTIONS: dict[str, Any] = {"pool": {"min_size": 1, "max_size": 10, "timeout": 10}}


def database(url: str) -> dict[str, Any]:
    """Return the settings of one database with the options of its vendor."""
    config: dict[str, Any] = environ.Env.db_url_config(url)
    options = SQLITE_OPTIONS if config["ENGINE"].endswith("sqlite3") else POSTGRES_OPTIONS
    return {
        **config,
        "CONN_MAX_AGE": 0,
        "CONN_HEALTH_CHECKS": True,
        "OPTIONS": {**options, **config.get("OPTIONS", {})},
    }


# What the demo's card service has charged, outside of every database.
CARD_SERVICE: Path = Path(env.str("CARD_SERVICE", default=str(BASE_DIR / "card-service.jsonl")))

DATABASES = {"default": database(env.str("DATABASE_URL", default=f"sqlite:///{BASE_DIR / 'db.sqlite3'}"))}

USE_TZ = True
TIME_ZONE = "UTC"
LANGUAGE_CODE = "en"
STATIC_URL = "static/"

HELIX_STORE: dict[str, Any] = {
    "STREAM_PERMISSION": "example_project.visitors.may_watch",
    # For ``helix_retention``. The sessions of framework adapters stay active.
    "RETENTION": {"sessions_idle_days": {"active": 30, "completed": 90, "failed": 30, "paused": 365}},
}
