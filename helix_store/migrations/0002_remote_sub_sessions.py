"""Schema version 2: the place where a sub-session runs, and the data of one that runs elsewhere."""

from django.db import models

from helix_store.migrations._operations import (
    RefuseToLose,
    WholeMigration,
    add_constraints,
    add_fields,
    choices,
)
from helix_store.models.constraints import one_of
from helix_store.models.fields import PayloadField


class Migration(WholeMigration):
    dependencies = [("helix_store", "0001_sessions")]

    operations = [
        *add_fields(
            "subsessionref",
            remote=PayloadField(blank=True, null=True),
            location=models.CharField(choices=choices("local", "remote"), default="local", max_length=8),
        ),
        *add_constraints("subsessionref", one_of("sub_ref_location_ck", "location", ["local", "remote"])),
        RefuseToLose("subsessionref", "remote"),
    ]
