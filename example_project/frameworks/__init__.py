"""A small agent of each framework on this store. Their models are scripts: no network is needed."""
