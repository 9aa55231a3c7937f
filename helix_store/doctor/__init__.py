"""The doctor: a report of the problems in a session database, with their fixes."""

from helix_store.doctor.examination import Listener, all_checks, diagnose
from helix_store.doctor.findings import Diagnosis, Fault, Finding, Sample, Severity, TableSize
from helix_store.doctor.rules import RULES, Rule

__all__ = [
    "RULES",
    "Diagnosis",
    "Fault",
    "Finding",
    "Listener",
    "Rule",
    "Sample",
    "Severity",
    "TableSize",
    "all_checks",
    "diagnose",
]
