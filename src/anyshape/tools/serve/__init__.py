"""The command `anyshape serve`: an inference server with dynamic batching."""
