"""Sessions of LangGraph in the tables of this app."""
