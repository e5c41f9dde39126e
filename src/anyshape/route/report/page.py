"""The report of routers as one HTML page that needs nothing else: heat maps are pictures that stand in it."""
from __future__ import annotations

import base64
import html
import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

MOST_COLUMNS = 16  # of a table of percentiles: branches of the largest shares
STYLE = """body{font:14px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem;color:#1b1f24}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}h3{font-size:1rem;margin-bottom:.2rem}
table{border-collapse:collapse;margin:.4rem 0}td,th{padding:.1rem .6rem .1rem 0;text-align:left;vertical-align:top}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}.no{color:#6b7480}.yes{color:#1f63d6}
img{image-rendering:pixelated;border:1px solid #d5dae0}figure{margin:.4rem 1.2rem .4rem 0;display:inline-block}
figcaption{color:#6b7480;font-size:12px}@media(prefers-color-scheme:dark){body{background:#15181c;color:#d9dee4}}"""


def page(data: dict[str, Any]) -> str:
    """The text of the page for the data of `collect`."""
    parts = [f"<h1>Routers: {len(data['routers'])}</h1>"]
    if data["overhead"]:
        least, middle, most = (f"{one:.2%}" for one in data["overhead"])
        parts.append(f"<p>Recording took {middle} of the time ({least} to {most}, 95 % confidence interval).</p>")
    parts += [_decisions(data["decisions"]), _table("What happened", ("second", "what", "why"), (
        (f"{one['seconds']:.2f}", one["what"], one["why"]) for one in data["events"]))]
    parts += [_table(f"{one['what']} {one['where']}", ("count", ""), (
        (name, _said(value)) for name, value in one.items() if name not in ("what", "where")))
        for one in data["observed"]]
    parts.append("<h2>Loads</h2>")
    parts += [_router(one) for one in data["routers"]]
    if data["joint"]:
        parts.append("<h2>Joint distributions</h2>")
        parts += [_joint(one) for one in data["joint"]]
    return f"<!doctype html><html lang=en><meta charset=utf-8><title>Routers</title><style>{STYLE}</style>" \
           f"<body>{''.join(parts)}</body></html>\n"


def _decisions(decisions: list[dict[str, Any]]) -> str:
    head = "<tr><th>router<th><th>optimisation<th class=n>expected<th>why"
    return f"<h2>Decisions</h2><table>{head}{''.join(map(_decision, decisions))}</table>" if decisions else ""


def _decision(one: dict[str, Any]) -> str:
    taken = "<td class=yes>taken" if one["applied"] else "<td class=no>refused"
    gain = "" if one["gain"] is None else f"{one['gain']:.2f}x"
    guard = "<br>guard: " + html.escape(one["guard"]) if one["guard"] and one["applied"] else ""
    return f"<tr><td>{html.escape(one['router'] or 'model')}{taken}<td>{html.escape(one['optimisation'])}" \
           f"<td class=n>{gain}<td>{html.escape(one['why'])}{guard}"


def _router(one: dict[str, Any]) -> str:
    title = f"<h3>{html.escape(one['name'])}</h3>"
    if not one["calls"]:
        return f"{title}<p>{one['branches']} branches, never called</p>"
    least, mean, most = one["cells"]
    lost = f", {one['lost']} lost" if one["lost"] else ""
    told = f"{one['branches']} branches, {one['choices']} choices a cell, {one['calls']} calls{lost}; cells {least} " \
           f"to {most}, {mean:.1f} in the mean; balance {one['balance']:.2f} of 1"
    order = sorted(range(one["branches"]), key=lambda branch: -one["rates"][branch])[:MOST_COLUMNS]
    rows = [("share", *(f"{one['rates'][branch]:.1%}" for branch in order)),
            *((f"{percent} %", *(str(loads[branch]) for branch in order))
              for percent, loads in zip(one["percents"], one["percentiles"], strict=True))]
    caption = f"loads up to {one['largest']}: branches from left to right, calls downwards"
    return f"{title}<p>{told}</p>{_picture(one['heat'], caption)}" + \
        _table("", ("branch", *map(str, order)), rows, True)


def _joint(one: dict[str, Any]) -> str:
    return _picture(one["counts"], f"{one['first']} (downwards) and {one['second']}: {one['information']:.2f} bits in "
                                   "common")


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]], numbers: bool = False) -> str:
    kind = " class=n" if numbers else ""
    body = "".join("<tr>" + "".join(f"<td{kind if place else ''}>{html.escape(one)}" for place, one in enumerate(row))
                   for row in rows)
    if not body:
        return ""
    top = "".join(f"<th{kind if place else ''}>{html.escape(one)}" for place, one in enumerate(head))
    return f"{f'<h2>{html.escape(title)}</h2>' if title else ''}<table><tr>{top}{body}</table>"


def _said(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_said(one)}" for name, one in value.items())
    return str(value)


def _picture(values: Sequence[Sequence[float]], caption: str) -> str:
    """A heat map; white is none, blue the largest."""
    if not values:
        return ""
    rows, columns = len(values), len(values[0])
    scale = max(4, min(16, 640 // max(columns, 1), 320 // rows))
    text = base64.b64encode(png(values)).decode()
    return f'<figure><img alt="{html.escape(caption)}" width={columns * scale} height={rows * scale} ' \
           f'src="data:image/png;base64,{text}"><figcaption>{html.escape(caption)}</figcaption></figure>'


def png(values: Sequence[Sequence[float]]) -> bytes:
    """A PNG file of a pixel for each value, from white to blue (31, 99, 214)."""
    largest = max((max(row, default=0) for row in values), default=0) or 1

    def pixel(value: float) -> bytes:
        part = value / largest
        return bytes(round(255 + (to - 255) * part) for to in (31, 99, 214))

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    lines = b"".join(b"\0" + b"".join(map(pixel, row)) for row in values)
    head = struct.pack(">IIBBBBB", len(values[0]), len(values), 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
