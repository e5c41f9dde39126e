"""The report of routers as a picture: a heat map of each router's loads. matplotlib is optional."""
from __future__ import annotations

import io
from typing import Any

from anyshape.base.optional_packages import check_picture

MOST = 24  # routers


def picture(data: dict[str, Any]) -> bytes:
    """A PNG of the data of `collect`: a panel per router and per joint distribution."""
    check_picture()
    from matplotlib.figure import Figure
    panels = [(f"{one['name']}: loads", one["heat"], "branch", "calls") for one in data["routers"] if one["heat"]]
    panels += [(f"{one['information']:.2f} bits in common", one["counts"], one["second"], one["first"])
               for one in data["joint"]]
    panels = panels[:MOST]
    figure = Figure(figsize=(10, 1 + 2.4 * max(-(-len(panels) // 2), 1)), layout="constrained")  # maybe no screen
    if panels:
        axes = figure.subplots(-(-len(panels) // 2), 2, squeeze=False).reshape(-1)
        for one, (title, values, across, down) in zip(axes, panels, strict=False):
            one.imshow(values, aspect="auto", cmap="Blues", vmin=0, interpolation="nearest")
            one.set_title(title, fontsize=9)
            one.set_xlabel(across)
            one.set_ylabel(down)
        for one in axes[len(panels):]:
            one.set_axis_off()
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=100)
    return stream.getvalue()
