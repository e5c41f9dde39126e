"""The GPU target (NVIDIA and AMD): loop programs by Triton, plans as launches on a stream through the vendor's driver."""
