"""The experiments, a folder each: what is run (experiment), how (worker), what was found (results, report)."""
