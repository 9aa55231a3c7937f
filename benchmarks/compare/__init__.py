"""This checkout against another one, path by path, on one server and in interleaved rounds."""
