"""The one door to a database: how a statement reaches it, and what its errors mean."""
