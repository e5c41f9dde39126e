"""Memory at run time: pools of blocks, offset assignment at given sizes, tapes, the offload store."""
