"""Sessions of Pydantic AI in the tables of this app."""
