"""Studies of dynamic networks: what no pair of a plain and a routed form tells."""
