"""The usage ledger: entries, prices and rollups."""
