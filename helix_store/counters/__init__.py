"""The counters of budgets: every change of the ledger changes them in its own transaction."""
