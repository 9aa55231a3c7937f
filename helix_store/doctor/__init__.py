"""The doctor: a report of the problems of a session database, and how to fix them."""

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
