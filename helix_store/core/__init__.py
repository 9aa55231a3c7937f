"""Types, contracts, ids, validation and payloads: pure Python, used by every package."""
