"""What the demo's process ends with."""

STOPPED = 130  # what a shell reports for a process that Ctrl-C ended
