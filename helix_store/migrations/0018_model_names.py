"""The names of the models that the admin shows, which are translated. The tables stay as they are."""

from typing import Final

from django.db import migrations

_NAMES: Final = {
    "checkpoint": ("checkpoint", "checkpoints"),
    "lock": ("lock", "locks"),
    "message": ("message", "messages"),
    "run": ("run", "runs"),
    "session": ("session", "sessions"),
    "stream": ("stream", "streams"),
    "usageentry": ("usage entry", "usage entries"),
}


class Migration(migrations.Migration):
    dependencies = [("helix_store", "0017_waiting_sessions")]

    operations = [
        migrations.AlterModelOptions(name=model, options={"verbose_name": one, "verbose_name_plural": many})
        for model, (one, many) in _NAMES.items()
    ]
