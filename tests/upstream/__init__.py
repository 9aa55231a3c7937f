"""The test suites of the frameworks themselves, pointed at the adapters here.

``python -m tests.upstream.<framework> [--database sqlite|postgres]`` downloads the released source
distribution, runs its tests and prints their counts. ``not_in_dev`` runs tests of ours. Nothing here is
collected by pytest.
"""
