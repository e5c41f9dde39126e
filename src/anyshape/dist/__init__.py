"""SPMD partitioning: meshes, placements, sharding rules, and one rank's local graph with its collectives."""
