"""The cost model: measured speeds, work of steps as formulas, autotuning, workspace of libraries."""
