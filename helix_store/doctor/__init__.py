"""The doctor: what is wrong with a database of sessions, and what to do about it."""

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
