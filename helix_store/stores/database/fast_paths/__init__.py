"""Hot paths on PostgreSQL in one prepared statement each, with the guarantees of the portable form.

Outside of the caller's block a data-modifying statement is a transaction by itself: it saves the trips for
``BEGIN`` and ``COMMIT``, and prepared it saves the planning, which costs more than the work. Each write holds
its whole decision in its conditions. When they do not all hold it changes nothing and returns nothing, and
the portable form, which locks first and then decides, has the last word: it finds the error or succeeds.

``HELIX_STORE["FAST_PATHS"] = False`` switches all of this off.
"""

from __future__ import annotations

from helix_store.stores.database.fast_paths.reads import FastCheckpoints, FastMessages
from helix_store.stores.database.fast_paths.sessions import FastSessions
from helix_store.stores.database.fast_paths.snapshots import FastSnapshots
from helix_store.stores.database.fast_paths.steps import FastStaging, FastSteps

__all__ = ["FastCheckpoints", "FastMessages", "FastSessions", "FastSnapshots", "FastStaging", "FastSteps"]
