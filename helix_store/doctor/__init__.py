"""The doctor: what is wrong with a database of sessions, and what to do about it."""

from helix_store.doctor.examination import CHECKS, Listener, diagnose
from helix_store.doctor.findings import Diagnosis, Fault, Finding, Sample, Severity, TableSize
from helix_store.doctor.rules import RULES, Rule

__all__ = [
    "CHECKS",
    "RULES",
    "Diagnosis",
    "Fault",
    "Finding",
    "Listener",
    "Rule",
    "Sample",
    "Severity",
    "TableSize",
    "diagnose",
]
