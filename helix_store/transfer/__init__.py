"""Export and import of sessions with all their data, as JSON Lines."""

from helix_store.transfer.export_source import DatabaseSource, ExportFile, NotAnExport, write_export
from helix_store.transfer.importing import import_units
from helix_store.transfer.records import ExportSummary, ImportSummary, Problem, Record, Source, Unit

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
