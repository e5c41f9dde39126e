"""The pass pipeline: order of passes, IR dumps, and hand-edited IR in place of a pass's."""
