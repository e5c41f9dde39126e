"""Throughput, first step and memory of models whose shapes change, against eager PyTorch and Inductor."""
