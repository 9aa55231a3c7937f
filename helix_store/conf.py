"""The settings dict ``HELIX_STORE``: one typed function per key, which reads the current value.

Only ``TABLE_PREFIX`` is fixed at start, because Django sets table names when it loads the models.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import Any, Final

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from helix_store.core.limits import Limits
from helix_store.core.retention import RetentionPolicy
from helix_store.core.streams import StreamOptions

__all__ = [
    "DEFAULTS",
    "constraint_name",
    "get",
    "is_citus",
    "limits",
    "stream_options",
    "table_name",
    "table_prefix_problem",
]

DEFAULTS: Final[dict[str, Any]] = {
    "TABLE_PREFIX": "helix_store_",
    "LIMITS": {},
    "DEFAULT_LOCK_TTL_MS": 30_000,
    "STREAMS": {},
    "WORKSPACE_PROVIDERS": {},
    "CHECKPOINTS_KEEP": None,
    "RETENTION": {},
    "STREAM_PERMISSION": None,
    "ASYNC_THREADS": 0,
    "PAGE_SIZE": 200,
    "FAST_PATHS": True,
    "ROW_LEVEL_SECURITY": False,
}

_DEFAULT_LIMITS: Final = Limits()

_PREFIX = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_POSTGRES_NAME_LENGTH = 63
_LONGEST_SUFFIX = len("interrupt_request_id_seq")


def configured() -> dict[str, Any]:
    """The dict of the project's settings; an empty one by default."""
    value = getattr(settings, "HELIX_STORE", {})
    if not isinstance(value, dict):
        raise ImproperlyConfigured("HELIX_STORE must be a dict.")
    return value


def get(name: str) -> Any:
    """The unchecked value of one key, or its default. For the system checks."""
    return configured().get(name, DEFAULTS[name])


def default_lock_ttl_ms() -> int:
    """The default term of a lock, in milliseconds."""
    return get("DEFAULT_LOCK_TTL_MS")  # type: ignore[no-any-return]


def workspace_providers() -> dict[str, str]:
    """Dotted paths of workspace providers, by the name in workspace refs."""
    return get("WORKSPACE_PROVIDERS")  # type: ignore[no-any-return]


def checkpoints_keep() -> int | None:
    """The number of step checkpoints that a step leaves to its session; ``None`` for all of them."""
    keep = get("CHECKPOINTS_KEEP")
    if keep is not None and (type(keep) is not int or keep < 1):
        raise ImproperlyConfigured(
            'HELIX_STORE["CHECKPOINTS_KEEP"] must be None or a whole number of at least 1.'
        )
    return keep


def retention() -> RetentionPolicy:
    """How long sessions, checkpoints, streams and usage are kept."""
    try:
        return RetentionPolicy(**get("RETENTION"))
    except (TypeError, ValueError) as exc:
        raise ImproperlyConfigured(f'HELIX_STORE["RETENTION"]: {exc}') from exc


def stream_permission() -> str | None:
    """The dotted path of the callable that checks the permission to read a stream; ``None`` if unset."""
    return get("STREAM_PERMISSION") or None


def async_threads() -> int:
    """The number of threads for asynchronous calls; 0 for Django's own thread for synchronous code."""
    return get("ASYNC_THREADS")  # type: ignore[no-any-return]


def page_size() -> int:
    """The number of rows that background work reads at once."""
    return get("PAGE_SIZE")  # type: ignore[no-any-return]


def fast_paths() -> bool:
    """Whether the one-statement forms and prepared statements of PostgreSQL are used."""
    return bool(get("FAST_PATHS")) and not row_level_security()


def row_level_security() -> bool:
    """Whether each transaction on PostgreSQL tells the database its tenant."""
    # Every statement asks, also those of the doctor, which reports settings that are not a dict.
    value = getattr(settings, "HELIX_STORE", None)
    return isinstance(value, dict) and value.get("ROW_LEVEL_SECURITY") is True


def is_citus(database: Mapping[str, Any]) -> bool:
    """Whether an entry of ``DATABASES`` says that Citus distributes the tables."""
    return database.get("HELIX_STORE_CITUS") is True


def limits(given: Limits | None = None) -> Limits:
    """The limits that a store was given, else ``HELIX_STORE["LIMITS"]`` over the defaults."""
    if given is not None:
        return given
    configured = get("LIMITS")
    if configured == {}:
        return _DEFAULT_LIMITS
    try:
        return Limits(**configured)
    except (TypeError, ValueError) as exc:
        raise ImproperlyConfigured(f'HELIX_STORE["LIMITS"]: {exc}') from exc


def stream_options() -> StreamOptions:
    """The options of ``HELIX_STORE["STREAMS"]``, in small or capital letters, over the defaults."""
    try:
        return StreamOptions(**{str(name).lower(): value for name, value in get("STREAMS").items()})
    except (TypeError, ValueError) as exc:
        raise ImproperlyConfigured(f'HELIX_STORE["STREAMS"]: {exc}') from exc


def table_prefix_problem(prefix: object) -> str | None:
    """Why a table prefix cannot be used, or ``None``."""
    if not isinstance(prefix, str) or not _PREFIX.fullmatch(prefix):
        return "it must match [a-zA-Z_][a-zA-Z0-9_]* as a whole"
    if len(prefix) + _LONGEST_SUFFIX > _POSTGRES_NAME_LENGTH:
        return (
            f"it may have at most {_POSTGRES_NAME_LENGTH - _LONGEST_SUFFIX} characters, because PostgreSQL "
            f"cuts names at {_POSTGRES_NAME_LENGTH} and two prefixes could then share a table"
        )
    return None


def require_usable_prefix() -> None:
    """Raise `ImproperlyConfigured` for a bad prefix. Models load with the default, so that checks can run."""
    if problem := table_prefix_problem(get("TABLE_PREFIX")):
        raise ImproperlyConfigured(f'HELIX_STORE["TABLE_PREFIX"] cannot be used: {problem}.')


def _prefix() -> str:
    prefix = get("TABLE_PREFIX")
    return DEFAULTS["TABLE_PREFIX"] if table_prefix_problem(prefix) else prefix  # type: ignore[no-any-return]


def table_name(suffix: str) -> str:
    return _prefix() + suffix


def constraint_name(suffix: str) -> str:
    """The name of an index or constraint: unique per prefix and within Django's 30 characters."""
    prefix = _prefix()
    if prefix == DEFAULTS["TABLE_PREFIX"]:
        return f"helix_{suffix}"
    return f"h{zlib.crc32(prefix.encode()):08x}_{suffix}"
