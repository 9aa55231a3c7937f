"""Settings for a process on a database of its own: ``FRESH_SETTINGS`` holds them as JSON."""

from __future__ import annotations

import json
import os

from tests.settings import *  # noqa: F403

_given = json.loads(os.environ["FRESH_SETTINGS"])
DATABASES = {"default": _given["database"]}
HELIX_STORE = _given["helix_store"]
