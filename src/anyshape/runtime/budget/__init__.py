"""The memory budget: what a call recomputes or offloads to stay within a limit in bytes."""
