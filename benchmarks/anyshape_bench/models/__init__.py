"""The models that are measured, their shapes, and a user's own."""
