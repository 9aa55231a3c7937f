"""The users of sessions by name: the ``user_id`` of a session is any text of the application."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlencode

from django.contrib.auth import get_user_model
from django.core.exceptions import ImproperlyConfigured, ValidationError
from django.utils.html import format_html
from django.utils.module_loading import import_string
from django.utils.safestring import SafeString

from helix_store import conf
from helix_store.admin.elements import one_line, printable
from helix_store.core.limits import MAX_BIGINT

_LONGEST_NAME = 80


def names_of_users(user_ids: Iterable[str | None]) -> dict[str, str]:
    """Return the names of users by their ids. Ids without a name are left out.

    The function of ``HELIX_STORE["ADMIN_USERS"]`` is called once with all ids. By default, an id that is the
    primary key of a user has the name ``str(user)``, which takes one statement.
    """
    wanted = list(dict.fromkeys(each for each in user_ids if each))
    if not wanted:
        return {}
    path = conf.admin_users()
    found: Mapping[str, Any] = _users(wanted) if path is None else import_string(path)(wanted)
    if not isinstance(found, Mapping):
        raise ImproperlyConfigured('The function of HELIX_STORE["ADMIN_USERS"] must return a mapping.')
    return {each: one_line(str(found[each]), _LONGEST_NAME) for each in wanted if each in found}


def _users(user_ids: list[str]) -> dict[str, Any]:
    model = get_user_model()
    keys = {}
    for user_id in user_ids:
        try:
            key = model._meta.pk.to_python(user_id)
        except ValidationError:
            continue
        # A number may be written in several ways, only one of which is the key.
        if str(key) == user_id and (not isinstance(key, int) or 0 < key <= MAX_BIGINT):
            keys[key] = user_id
    found = model._default_manager.in_bulk(keys) if keys else {}
    return {keys[key]: user for key, user in found.items()}


def user_link(address: str, user_id: str, names: Mapping[str, str]) -> SafeString:
    """Return the name of a user as a link to the list of their sessions; the id is a tooltip.

    ``address`` is that of the list.
    """
    name, title = names.get(user_id), printable(user_id)
    try:
        url = f"{address}?{urlencode({'user': user_id})}"
    except UnicodeEncodeError:
        return format_html('<span class="helix-narrow">{}</span>', title)
    return format_html(
        '<a class="helix-narrow" href="{}" title="{}">{}</a>', url, title, name if name else title
    )
