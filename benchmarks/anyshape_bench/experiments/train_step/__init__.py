"""Whole train steps as one program, against eager PyTorch and Inductor."""
