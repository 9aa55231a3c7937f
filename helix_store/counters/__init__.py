"""The counters of budgets: every change to the ledger updates them in the same transaction."""
