"""Settings of a process with the chat of `tests.chat.ending`."""

from __future__ import annotations

from tests.chat import server_settings

globals().update({name: value for name, value in vars(server_settings).items() if name.isupper()})

ROOT_URLCONF = "tests.chat.ending"
