"""Budgets: caps on what sessions spend, exact with any number of workers."""
