"""Code generation for devices behind one interface."""
