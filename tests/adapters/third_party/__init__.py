"""The app of docs/adapters.md, installed in the tests: pages of notebooks, and what they share."""
