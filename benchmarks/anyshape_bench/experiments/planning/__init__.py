"""Memory plans of whole train steps (order and offset assignment), against other planners."""
