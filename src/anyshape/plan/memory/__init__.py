"""Buffer memory for all sizes: in-place reuse, aliasing, allocation and freeing, symbolic offset assignment."""
