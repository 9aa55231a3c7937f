"""Durable agent sessions in your own Django database."""

__all__ = ["__version__"]

__version__ = "0.1.0"
