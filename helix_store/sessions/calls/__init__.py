"""The public calls of a state store, by subject."""
