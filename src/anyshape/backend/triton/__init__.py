"""The GPU target (NVIDIA and AMD): code generation by Triton, compiled ahead of time, and plans as launches on a stream
through the vendor's driver."""
