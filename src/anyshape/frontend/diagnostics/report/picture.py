"""The report as a picture: each program's curve where the sliders stand first. matplotlib is optional."""
from __future__ import annotations

import io
from typing import Any

from anyshape.base.optional_packages import check_picture
from anyshape.base.units import bytes_text

GREY, BLUE, RED = "#8b939b", "#1f63d6", "#c3251d"


def picture(data: dict[str, Any]) -> bytes:
    """A PNG of the data of `collect`: a panel per program."""
    check_picture()
    from matplotlib.figure import Figure
    programs = [one for one in data["programs"] if one["points"]]
    figure = Figure(figsize=(10, 1 + 3.6 * max(len(programs), 1)), layout="constrained")  # no pyplot: maybe no screen
    figure.suptitle(f"Memory of {data['name']}")
    if programs:
        for axes, program in zip(figure.subplots(len(programs), 1, squeeze=False)[:, 0], programs, strict=True):
            _panel(axes, program)
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=120)
    return stream.getvalue()


def _panel(axes: Any, program: dict[str, Any]) -> None:
    point = program["points"][0]
    before, after = ([one / 1e6 for one in point["curves"][name]] for name in ("before", "after"))
    steps = range(len(before) + 1)
    axes.stairs(before, steps, color=GREY, fill=True, alpha=0.25)
    axes.stairs(before, steps, color=GREY, label=f"everything kept: {max(before):.1f} MB", baseline=None)
    chosen = point["chosen"]
    if isinstance(chosen, int) and chosen > 0:
        axes.stairs(after, steps, color=BLUE, linewidth=2, baseline=None,
                    label=f"{choice_text(point['choices'][chosen])}: {max(after):.1f} MB, "
                          f"some {point['choices'][chosen]['seconds'] * 1e3:.1f} ms longer")
    if program["limited"]:
        limit = program["limited"] / 1e6
        axes.axhline(limit, color=RED, linestyle="--", label=f"limit {limit:.1f} MB")
    if program["border"] < len(before):
        axes.axvline(program["border"], color=GREY, linewidth=1)
    sizes = ", ".join(f"{name}={value}" for name, value in point["values"].items())
    axes.set_title(f"{' and '.join(program['parts'])} at {sizes or 'its fixed sizes'}", fontsize=10)
    axes.set_xlabel("step, forward then backward" if program["border"] < len(before) else "step")
    axes.set_ylabel("MB alive")
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, len(before))
    axes.legend(fontsize=8, frameon=False)


def choice_text(choice: dict[str, Any]) -> str:
    """What a choice does, in a few words."""
    moved = f", {choice['moved']} moved out ({bytes_text(choice['away'])})" if choice["moved"] else ""
    return f"{choice['dropped']} values computed again{moved}"
