"""The public face of a state store: checks arguments, encodes payloads, and hands on to a back end."""

from helix_store.stores.api.state_store import StateStoreBase

__all__ = ["StateStoreBase"]
