"""Optional parts, which nothing else imports."""
