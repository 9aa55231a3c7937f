"""Access to the database: the execution of statements, and the meaning of errors."""
