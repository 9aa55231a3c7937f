"""The version of the project's code with each run.

Workers of the version before this migration go on beside it: they leave the column null.
"""

from helix_store.migrations._operations import RefuseToLose, WholeMigration, add_fields
from helix_store.models.fields import IdentifierField


class Migration(WholeMigration):
    dependencies = [("helix_store", "0018_answer_permission")]

    operations = [
        *add_fields("run", build=IdentifierField(blank=True, null=True)),
        RefuseToLose("run", "build", remove="Forget them with Run.objects.update(build=None)."),
    ]
