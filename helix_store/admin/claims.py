"""The claim on a snapshot as text."""

from __future__ import annotations

from typing import Final

from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext

from helix_store.admin.elements import badge, distance, one_line, under
from helix_store.core import moments
from helix_store.models import Checkpoint

__all__ = ["claim_of"]

_OWNER_LENGTH: Final = 60


def claim_of(snapshot: Checkpoint) -> SafeString:
    """Return a text that shows if a snapshot is free, claimed (by whom and until when) or resumed."""
    if snapshot.claim_done_at is not None:
        status, words, when = "resumed", "{when}", snapshot.claim_done_at
    elif snapshot.claim_expires_at is None:
        return badge("free")
    elif snapshot.claim_expires_at > moments.now():
        status, words, when = "held", gettext("ends {when}"), snapshot.claim_expires_at
    else:
        status, words, when = "expired", gettext("ended {when}"), snapshot.claim_expires_at
    owner = under(one_line(snapshot.claim_owner or "", _OWNER_LENGTH))
    line = format_html(words, when=distance(when))
    return format_html('{}{}<span class="helix-under">{}</span>', badge(status), owner, line)
