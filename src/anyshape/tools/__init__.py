"""The commands of `anyshape`."""
