"""Collectives: what they compute on tensors, all ranks in one process by the interpreter, and real process groups."""
