"""The front ends: `torch.compile`, `torch.export`, whole train steps; from there to a graph and back to the caller."""
