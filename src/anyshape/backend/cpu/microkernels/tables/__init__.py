"""The tables of microkernels: what the routines of each family are called, in the order of the host's table of
functions, and the sizes of their panels. Encoders and loaders need no more; what prints the routines stands above."""
