"""The runtime abstraction layer (RAL): what programs need of their host, with a driver for each: PyTorch, numpy."""
