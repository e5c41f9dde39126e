"""From groups of equations to loop programs: the loop IR, lowering, fusion, and schedules."""
