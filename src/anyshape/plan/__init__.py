"""The plan, the host's program: its IR, buffer memory, rematerialisation, the schedule of steps, the verifier."""
