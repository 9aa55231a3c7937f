"""The state store: sessions, messages, steps, checkpoints, runs and waiting."""
