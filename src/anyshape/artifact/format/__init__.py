"""The members of a file to deploy: the container, weights, signature, machine code, and how much text is read."""
