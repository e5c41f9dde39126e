"""The CPU as a target: features, caches, and symbols of the libraries that torch loads."""
