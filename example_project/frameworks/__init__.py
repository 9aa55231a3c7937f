"""A small agent of each framework on this store. Their models are scripts, so they need no network."""
