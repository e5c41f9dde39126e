"""The bytecode of plans: its format, and the encoders that write it for given sizes."""
