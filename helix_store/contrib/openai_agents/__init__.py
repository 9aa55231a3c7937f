"""Sessions of OpenAI Agents in the tables of this app."""
