"""Dynamic networks: routed forms against the plain loop in eager, under Inductor, padded, and by grouped_mm."""
