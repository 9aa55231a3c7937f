"""Locks with fencing tokens."""
