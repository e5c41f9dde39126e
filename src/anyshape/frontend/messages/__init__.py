"""Messages: torch's guards and errors in the words of the user's program."""
