"""The state store in memory."""
