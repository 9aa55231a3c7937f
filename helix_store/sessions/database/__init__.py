"""The state store in a database."""
