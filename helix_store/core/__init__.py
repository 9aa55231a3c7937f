"""The rules, in pure Python: what the store decides, without knowing where anything is kept."""
