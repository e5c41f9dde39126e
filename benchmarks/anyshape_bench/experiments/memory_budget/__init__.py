"""Train steps under a memory budget, beside PyTorch's rematerialisation."""
