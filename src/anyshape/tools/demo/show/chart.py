"""The peaks of the last steps under the limit, as a terminal draws them.

    limit 60.1 MB ━━━━━━━━━━━━━━━━    a red line
                  ▇▇ ██ ▄▄    ██
                  ██ ██ ██ ▂▂ ██      per step: predicted, counted
"""
from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

HEIGHT = 8  # rows of a terminal
STEP = 3  # columns: predicted, counted, a space
BLOCKS = " ▁▂▃▄▅▆▇█"
PREDICTED, COUNTED, LIMIT = "cyan", "green", "bold red"


def peaks(predicted: Sequence[int], counted: Sequence[int], limit: int, label: str, width: int) -> Text:
    """Bars of as many of the last steps as fit into `width` columns; the line on top stands for `limit` bytes."""
    label = label.rjust(len("predicted"))
    left = len(label) + 1
    steps = max((width - left) // STEP, 1)
    shown = list(zip(predicted[-steps:], counted[-steps:], strict=True))
    drawn = Text(no_wrap=True, overflow="crop")
    drawn.append(f"{label} ", style=LIMIT)
    for pair in shown:  # what is above the limit would break through the line
        drawn.append("".join("▲" if one > limit else "━" for one in pair) + "━", style=LIMIT)
    for row in reversed(range(HEIGHT)):
        drawn.append("\n" + ("predicted" if row == 1 else "counted" if row == 0 else "").rjust(left - 1) + " ",
                     style=PREDICTED if row == 1 else COUNTED)
        for pair in shown:
            for one, style in zip(pair, (PREDICTED, COUNTED), strict=True):
                eighths = round(8 * HEIGHT * min(one, limit) / max(limit, 1)) - 8 * row
                drawn.append(BLOCKS[max(0, min(8, eighths))], style=style)
            drawn.append(" ")
    return drawn
