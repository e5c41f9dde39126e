"""Native bytecode encoders: a plan's template (backend/cpu/bytecode/template.py) at given sizes becomes words."""
