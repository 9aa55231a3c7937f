"""Sessions of Strands in the tables of this app."""
