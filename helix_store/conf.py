"""The settings dict ``HELIX_STORE``, with one typed function per key that reads the current value.

Only ``TABLE_PREFIX`` is fixed at start, because Django sets table names when it loads the models.
"""

from __future__ import annotations

import functools
import re
import sqlite3
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from helix_store.core.limits import MAX_BATCH, MAX_TTL_MS, Limits
from helix_store.core.streams import StreamOptions
from helix_store.core.types import RetentionPolicy

FIRST_SAFE_SQLITE: Final = (3, 51, 3)
"""The first version without the WAL-reset bug, https://sqlite.org/wal.html#walresetbug."""
_BACKPORTS_OF_THE_FIX: Final = ((3, 44, 6), (3, 50, 7))

ROUTED_MODEL: Final = "helix_store.Session"
"""The model about which the project's routers are asked. Its database has all rows of a tenant."""

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
    "RUN_ERROR_DETAILS": True,
    "TOMBSTONE_DAYS": 30,
    "CHAT_THREADS": 8,
    "CHAT_FLUSH_MS": 40,
    "ANSWER_PAGES": False,
    "ADMIN_TENANTS": None,
    "ADMIN_USERS": None,
    "ADMIN_VIEWS": {},
    "BUILD": None,
}

TENANT_POLICY: Final = "helix_store_tenant"
"""The policy on each table. Do not rename it: old policies would stay in databases."""

TENANT_VARIABLE: Final = "helix_store.tenant"
"""The value holds a colon and the tenant, because the default tenant and an unset variable are both empty."""

_DEFAULT_LIMITS: Final = Limits()

_PREFIX = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_POSTGRES_NAME_LENGTH = 63
_MOST_DAYS: Final = 36_500
_LONGEST_BUILD: Final = 64
_LONGEST_SUFFIX = len("interrupt_request_id_seq")

WHOLE_NUMBERS: Final[dict[str, tuple[int, int]]] = {
    "DEFAULT_LOCK_TTL_MS": (1, MAX_TTL_MS),
    "ASYNC_THREADS": (0, 1_000),
    "PAGE_SIZE": (1, MAX_BATCH),
    "CHAT_THREADS": (1, 1_000),
    "CHAT_FLUSH_MS": (0, 10_000),
}
"""The smallest and the largest value of each setting that is a whole number."""


def configured() -> dict[str, Any]:
    """Return the dict of the project's settings, which is empty by default."""
    value = getattr(settings, "HELIX_STORE", {})
    if not isinstance(value, dict):
        raise ImproperlyConfigured("HELIX_STORE must be a dict.")
    return value


def get(name: str) -> Any:
    """Return the unchecked value of one key, or its default. It is used by the system checks."""
    return configured().get(name, DEFAULTS[name])


def whole_number(name: str) -> int:
    """Return a setting that is a whole number. Raise `ImproperlyConfigured` if it is out of bounds."""
    value = get(name)
    least, most = WHOLE_NUMBERS[name]
    if type(value) is not int or not least <= value <= most:
        raise ImproperlyConfigured(f'HELIX_STORE["{name}"] must be a whole number from {least} to {most}.')
    return value


def default_lock_ttl_ms() -> int:
    """Return the default term of a lock, in milliseconds."""
    return whole_number("DEFAULT_LOCK_TTL_MS")


def workspace_providers() -> dict[str, str]:
    """Return the dotted paths of the workspace providers, by the name that workspace refs use."""
    return get("WORKSPACE_PROVIDERS")  # type: ignore[no-any-return]


def checkpoints_keep() -> int | None:
    """Return the number of step checkpoints that a step keeps, or ``None`` for all."""
    keep = get("CHECKPOINTS_KEEP")
    if keep is not None and (type(keep) is not int or keep < 1):
        raise ImproperlyConfigured(
            'HELIX_STORE["CHECKPOINTS_KEEP"] must be None or a whole number of at least 1.'
        )
    return keep


def retention() -> RetentionPolicy:
    """Return the retention policy for sessions, checkpoints, streams and usage."""
    try:
        return RetentionPolicy(**get("RETENTION"))
    except (TypeError, ValueError) as exc:
        raise ImproperlyConfigured(f'HELIX_STORE["RETENTION"]: {exc}') from exc


def stream_permission() -> str | None:
    """Return the dotted path of the callable that permits reading a stream, or ``None`` if unset."""
    return get("STREAM_PERMISSION") or None


def async_threads() -> int:
    """Return the number of threads for async calls; 0 means Django's own thread for synchronous code."""
    return whole_number("ASYNC_THREADS")


def page_size() -> int:
    """Return the number of rows that background work reads at once."""
    return whole_number("PAGE_SIZE")


def fast_paths() -> bool:
    """Return whether to use one-statement forms and prepared statements on PostgreSQL."""
    return bool(get("FAST_PATHS")) and not row_level_security()


def row_level_security() -> bool:
    """Return whether each transaction on PostgreSQL sets its tenant."""
    # Every statement checks this, even those of the doctor, which reports settings that are not a dict.
    value = getattr(settings, "HELIX_STORE", None)
    return isinstance(value, dict) and value.get("ROW_LEVEL_SECURITY") is True


class Features(NamedTuple):
    """The forms of the statements that a database receives."""

    tells_tenant: bool = False
    """True if each transaction sets the tenant first, for the policies of the database."""
    is_citus: bool = False
    has_fast_reads: bool = False
    """True if reads are prepared."""
    has_fast_writes: bool = False


PORTABLE: Final = Features()


def features(database: Mapping[str, Any]) -> Features:
    """Return the forms for PostgreSQL, according to the settings and the entry in ``DATABASES``."""
    given = configured()
    if given.get("ROW_LEVEL_SECURITY") is True:
        return Features(tells_tenant=True, is_citus=is_citus(database))
    return _features(bool(given.get("FAST_PATHS", True)), is_citus(database))


@functools.cache
def _features(is_fast: bool, is_distributed: bool) -> Features:
    # Every call needs one, and making it costs a microsecond.
    return Features(False, is_distributed, is_fast, is_fast and not is_distributed)


def run_error_details() -> bool:
    """Return whether a failed run keeps the message and traceback of its exception, not only the type."""
    return get("RUN_ERROR_DETAILS") is True


def tombstone_days() -> float:
    """Return the number of days for which an erased session's id is not created by a write; 0 for never."""
    days = get("TOMBSTONE_DAYS")
    if type(days) not in (int, float) or not 0 <= days <= _MOST_DAYS:
        raise ImproperlyConfigured(
            f'HELIX_STORE["TOMBSTONE_DAYS"] must be a number of days between 0 and {_MOST_DAYS}.'
        )
    return float(days)


def chat_threads() -> int:
    """Return the number of threads that drive the chats of a process, unless a chat has its own runner."""
    return whole_number("CHAT_THREADS")


def chat_flush_ms() -> int:
    """Return the milliseconds for which a chat collects what an agent says before it writes it."""
    return whole_number("CHAT_FLUSH_MS")


def answer_pages() -> bool:
    """Return whether `helix_store.urls` serves pages on which people answer approvals."""
    return get("ANSWER_PAGES") is True


def admin_tenants() -> Callable[[Any], Any] | None:
    """Return the function that returns the tenants of a request to the admin, or ``None`` for all tenants."""
    given = get("ADMIN_TENANTS")
    if given is None or callable(given):
        return given  # type: ignore[no-any-return]
    problem = 'HELIX_STORE["ADMIN_TENANTS"] must be None, a callable, or the dotted path of a callable'
    if not isinstance(given, str):
        raise ImproperlyConfigured(f"{problem}.")
    try:
        found = import_string(given)
    except Exception as exc:
        # A module of the project may raise anything when it is imported.
        raise ImproperlyConfigured(f"{problem}: {type(exc).__name__}: {exc}.") from exc
    if not callable(found):
        raise ImproperlyConfigured(f"{problem}: {given} is not callable.")
    return found  # type: ignore[no-any-return]


def admin_users() -> str | None:
    """Return the dotted path of the function that names users in the admin, or ``None`` if unset."""
    return get("ADMIN_USERS") or None


def admin_views() -> dict[str, str]:
    """Return the queries of the views above the admin's list of sessions, by name."""
    views = get("ADMIN_VIEWS")
    if not isinstance(views, dict) or not all(
        isinstance(each, str) for pair in views.items() for each in pair
    ):
        raise ImproperlyConfigured(
            'HELIX_STORE["ADMIN_VIEWS"] must be a dict of names and queries, both text.'
        )
    return views


def build() -> str | None:
    """Return the version of the project's code, which each run stores, or ``None``."""
    given = get("BUILD")
    if given is None or (isinstance(given, str) and 0 < len(given) <= _LONGEST_BUILD and given.isprintable()):
        return given
    raise ImproperlyConfigured(
        f'HELIX_STORE["BUILD"] must be None or a printable string of 1 to {_LONGEST_BUILD} characters.'
    )


def is_citus(database: Mapping[str, Any]) -> bool:
    """Return whether Citus distributes the tables, according to the entry in ``DATABASES``."""
    return database.get("HELIX_STORE_CITUS") is True


def limits(given: Limits | None = None) -> Limits:
    """Return the limits that were passed to a store, or ``HELIX_STORE["LIMITS"]`` over the defaults."""
    if given is not None:
        return given
    configured = get("LIMITS")
    if configured == {}:
        return _DEFAULT_LIMITS
    try:
        return Limits(**configured)
    except (TypeError, ValueError) as exc:
        raise ImproperlyConfigured(f'HELIX_STORE["LIMITS"]: {exc}') from exc


def rules_of_step(given: Limits | None = None) -> tuple[Limits, int | None]:
    """Return the `limits` and the `checkpoints_keep` that a step obeys. Every step asks for both."""
    return limits(given), checkpoints_keep()


def stream_options() -> StreamOptions:
    """Return the options of ``HELIX_STORE["STREAMS"]``, in lower or upper case, merged with the defaults."""
    given: dict[str, Any] = {}
    try:
        for name, value in get("STREAMS").items():
            if (option := str(name).lower()) in given:
                raise ValueError(f"{option} is given twice, in lower and in upper case")
            given[option] = value
        return StreamOptions(**given)
    except (TypeError, ValueError) as exc:
        raise ImproperlyConfigured(f'HELIX_STORE["STREAMS"]: {exc}') from exc


def table_prefix_problem(prefix: object) -> str | None:
    """Return the reason why a table prefix cannot be used, or ``None``."""
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
    try:
        prefix = get("TABLE_PREFIX")
    except ImproperlyConfigured:
        # Models also load if the settings are not a dict, so that a check can report this.
        prefix = None
    return DEFAULTS["TABLE_PREFIX"] if table_prefix_problem(prefix) else prefix  # type: ignore[no-any-return]


def table_name(suffix: str) -> str:
    return _prefix() + suffix


def constraint_name(suffix: str) -> str:
    """Return the name of an index or constraint: unique per prefix and within Django's 30 characters."""
    prefix = _prefix()
    if prefix == DEFAULTS["TABLE_PREFIX"]:
        return f"helix_{suffix}"
    return f"h{zlib.crc32(prefix.encode()):08x}_{suffix}"


def sqlite_options(*, timeout: float = 20) -> dict[str, Any]:
    """Return the ``OPTIONS`` of a database on SQLite, with which all checks pass and no commit is lost.

    A transaction takes the write lock when it begins, and waits for it for up to ``timeout`` seconds. Commits
    survive a power failure. Readers do not wait for the writer (WAL mode), unless this version of SQLite has
    the WAL-reset bug: then the journal mode is ``TRUNCATE``.

    Example::

        DATABASES["default"]["OPTIONS"] = helix_store.sqlite_options()
    """
    journal_mode = "TRUNCATE" if has_the_wal_reset_bug() else "WAL"
    return {
        "timeout": timeout,
        "transaction_mode": "IMMEDIATE",
        "init_command": f"PRAGMA journal_mode={journal_mode}; PRAGMA synchronous=FULL;",
    }


def has_the_wal_reset_bug() -> bool:
    """Return whether WAL mode can corrupt a database with this version of SQLite."""
    version = sqlite3.sqlite_version_info
    has_a_backport = any(fixed <= version < (3, fixed[1] + 1) for fixed in _BACKPORTS_OF_THE_FIX)
    return version < FIRST_SAFE_SQLITE and not has_a_backport
