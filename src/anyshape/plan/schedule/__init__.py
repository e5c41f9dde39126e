"""The schedule of steps: their order by memory, launch groups, tiled consumers of matrix products."""
