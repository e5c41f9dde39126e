"""Strategy search over shardings: problem, solver, judge."""
