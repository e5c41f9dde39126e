"""The experiment harness: worker processes in fresh environments, result files, and how results are shown."""
