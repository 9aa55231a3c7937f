"""Export and import of sessions with all their data, as JSON Lines."""

from helix_store.transfer.database import DatabaseSource
from helix_store.transfer.importing import import_units
from helix_store.transfer.reading import ExportFile, NotAnExport
from helix_store.transfer.records import Problem, Record, Source, Unit
from helix_store.transfer.summary import ExportSummary, ImportSummary
from helix_store.transfer.writing import write_export

__all__ = [
    "DatabaseSource",
    "ExportFile",
    "ExportSummary",
    "ImportSummary",
    "NotAnExport",
    "Problem",
    "Record",
    "Source",
    "Unit",
    "import_units",
    "write_export",
]
