"""Optional packages that no other package imports."""
