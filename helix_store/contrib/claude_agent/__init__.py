"""Sessions of Claude Agent SDK in the tables of this app."""
