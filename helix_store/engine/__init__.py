"""Access to the database: how a statement reaches it, and what its errors mean."""
