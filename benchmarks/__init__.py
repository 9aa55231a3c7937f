"""How fast the store is, against the database's own limit and against its peers, in one run."""
