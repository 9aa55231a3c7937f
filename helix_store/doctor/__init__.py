"""The doctor: a report of the problems in a session database, with their fixes."""

from helix_store.doctor.examination import Listener, all_checks, diagnose
from helix_store.doctor.findings import RULES, Diagnosis, Fault, Finding, Rule, Sample, Severity, TableSize

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
