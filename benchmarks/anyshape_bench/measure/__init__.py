"""What is counted beside time: memory, launches, predicted peaks, and programs for one static shape."""
