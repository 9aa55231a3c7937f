"""Checkpoints of graph runtimes."""
