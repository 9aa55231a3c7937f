"""Schema version 2: the place where a sub-session runs, and the data of one that runs elsewhere."""

from django.db import migrations, models

from helix_store.conf import constraint_name
from helix_store.migrations._operations import RefuseToLose, WholeMigration
from helix_store.models.fields import PayloadField


class Migration(WholeMigration):
    dependencies = [("helix_store", "0001_sessions")]

    operations = [
        migrations.AddField(
            model_name="subsessionref", name="remote", field=PayloadField(blank=True, null=True)
        ),
        migrations.AddField(
            model_name="subsessionref",
            name="location",
            field=models.CharField(
                choices=[("local", "local"), ("remote", "remote")], default="local", max_length=8
            ),
        ),
        migrations.AddConstraint(
            model_name="subsessionref",
            constraint=models.CheckConstraint(
                condition=models.Q(("location__in", ["local", "remote"])),
                name=constraint_name("sub_ref_location_ck"),
            ),
        ),
        RefuseToLose("subsessionref", "remote"),
    ]
