"""A call: dispatch on arguments, the executable, the call frame, operators that are resolved once."""
