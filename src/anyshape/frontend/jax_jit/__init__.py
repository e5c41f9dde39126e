"""`anyshape.jax.jit`: a function of JAX, compiled once for all sizes, alone and inside of `jax.jit` by XLA's FFI."""
