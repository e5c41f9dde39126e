"""The plan IR: buffers, windows, steps; text; liveness; helpers that edit a plan."""
