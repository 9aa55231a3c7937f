"""Snapshots of agents."""
