"""Steps that PyTorch does: operators, convolutions, random masks; the reference interpreter."""
