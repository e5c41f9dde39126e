"""Whole train steps: loss, gradients and the optimiser's update as one program."""
