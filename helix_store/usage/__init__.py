"""The usage ledger: entries, prices and roll-ups."""
