"""The importer: an fx graph of ATen operators becomes a graph of the IR."""
