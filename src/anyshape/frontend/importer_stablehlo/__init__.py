"""The importer of StableHLO modules: what JAX, TensorFlow and others export becomes a graph of the IR."""
