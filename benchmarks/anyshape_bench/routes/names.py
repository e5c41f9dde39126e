"""Names of the ways to run a case. Needs no torch."""
EAGER, INDUCTOR, PADDED, GROUPED, LOOP, ROUTED, PLANNED = (
    "eager", "inductor", "padded", "grouped_mm", "anyshape-loop", "routed", "planned")
BASELINES = (EAGER, INDUCTOR, PADDED, GROUPED)
