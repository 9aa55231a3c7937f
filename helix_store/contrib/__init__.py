"""Optional packages, which nothing else imports."""
