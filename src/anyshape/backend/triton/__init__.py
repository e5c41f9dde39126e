"""GPU code generation by Triton: loop programs as Triton text, compiled ahead of time, for NVIDIA and AMD."""
