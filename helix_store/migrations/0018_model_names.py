"""The names of the models that the admin shows, which are translated. The tables stay as they are."""

from typing import Final

from django.db import migrations

from helix_store.migrations._whole import WholeMigration

_NAMES: Final = {
    "checkpoint": ("checkpoint", "checkpoints"),
    "lock": ("lock", "locks"),
    "message": ("message", "messages"),
    "run": ("run", "runs"),
    "session": ("session", "sessions"),
    "stream": ("stream", "streams"),
    "usageentry": ("usage entry", "usage entries"),
}


class Migration(WholeMigration):
    dependencies = [("helix_store", "0017_waiting_sessions")]

    operations = [
        migrations.AlterModelOptions(name=model, options={"verbose_name": one, "verbose_name_plural": many})
        for model, (one, many) in _NAMES.items()
    ]
