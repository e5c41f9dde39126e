"""The compiler driver: from a graph to an executable, by way of passes, kernels and a plan."""
