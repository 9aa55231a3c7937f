"""A module of a project that fails when it is imported."""

raise RuntimeError("The key of the service is missing.")
