"""The pass pipeline of plans: order of passes, and hand-edited plans in place of a pass's."""
