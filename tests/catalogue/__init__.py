"""Every walk over the tables: its results on ten databases, and one table that one declaration adds."""
