"""The process context: what all programs of a process share."""
