"""Several databases, each with some of the tenants."""
