"""Dynamic networks of `anyshape bench routes`: each in plain torch and in routed form, with forced routes."""
