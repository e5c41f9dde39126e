"""Draws results as PNG files: one picture of a run, and details beside it. matplotlib is optional."""
from __future__ import annotations

from pathlib import Path
from typing import Any

from anyshape.base.errors import ConfigError
from anyshape_bench.experiments.speed.results import Results, backends_of, cells, models_of, records_of


def _pyplot() -> Any:
    """matplotlib's pyplot, drawing into files; None where it is not installed."""
    try:
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return None
    return pyplot


def can_draw() -> bool:
    """Is matplotlib there?"""
    return _pyplot() is not None


def check_chart() -> None:
    """Raises ConfigError where `chart` could not draw, so that it is known before hours of measuring."""
    if not can_draw():
        raise ConfigError("--chart needs the package matplotlib", why="it is not installed",
                          do="pip install anyshape[bench], or leave --chart out")


def chart(results: Results, path: Path) -> Path | None:
    """Draws one picture: throughput at seen shapes and peak memory of every model on every backend, relative to eager.
    None where no model has a number relative to eager.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    return groups(results, (("repeated", "throughput at seen shapes (eager = 1, more is better)"),
                            ("peak_ratio", "peak memory (eager = 1, less is better)")), path)


def groups(results: Results, parts: tuple[tuple[str, str], ...], path: Path) -> Path | None:
    """Draws one picture with a part for each field of the cells, a ratio to eager, and its title. None where no model
    has any.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    check_chart()
    pyplot = _pyplot()
    if not any(getattr(cell, field) for cell in cells(results) for field, _ in parts):
        return None
    figure, places = pyplot.subplots(len(parts), 1, figsize=(1.6 * len(models_of(results)) + 3, 3.6 * len(parts)))
    for axes, (field, title) in zip(places, parts, strict=True):
        _groups(axes, results, field, title)
        axes.axhline(1.0, color="gray", linewidth=0.8)
    return _written(pyplot, figure, path)


def charts(results: Results, folder: Path) -> list[Path]:
    """Draws throughput, first step, memory, and step time by shape as PNG files; empty without matplotlib."""
    pyplot = _pyplot()
    if pyplot is None:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    bars: tuple[tuple[str, str, str, bool], ...] = (
        ("fresh", "throughput at new shapes, eager = 1", "new_shapes.png", False),
        ("repeated", "throughput at seen shapes, eager = 1", "seen_shapes.png", False),
        ("cold", "cold first step, seconds", "cold_first_step.png", True),
        ("warm", "warm first step, seconds", "warm_first_step.png", True),
        ("peak_ratio", "peak memory above parameters and optimiser state, eager = 1", "peak_memory.png", False),
    )
    written = [path for field, title, file, logarithmic in bars
               if (path := _bars(pyplot, results, field, title, folder / file, logarithmic))]
    return written + [path for model in models_of(results) if (path := _steps(pyplot, results, model, folder))]


def _bars(pyplot: Any, results: Results, field: str, title: str, path: Path, logarithmic: bool) -> Path | None:
    """Groups of bars, a group per model, a bar per backend."""
    if not any(getattr(cell, field) for cell in cells(results)):
        return None
    figure, axes = pyplot.subplots(figsize=(1.6 * len(models_of(results)) + 3, 3.6))
    _groups(axes, results, field, title)
    if logarithmic:
        axes.set_yscale("log")
    return _written(pyplot, figure, path)


def _groups(axes: Any, results: Results, field: str, title: str) -> None:
    """The bars of one field of every cell; models without any are left out."""
    values = {(c.model, c.backend): getattr(c, field) for c in cells(results)}
    backends = backends_of(results)
    models = [m for m in models_of(results) if any(values.get((m, b)) for b in backends)]
    width = 0.8 / len(backends)
    for i, backend in enumerate(backends):
        heights = [values.get((m, backend)) or 0.0 for m in models]
        places = [x + (i - (len(backends) - 1) / 2) * width for x in range(len(models))]
        drawn = axes.bar(places, heights, width, label=backend)
        axes.bar_label(drawn, labels=[f"{h:.2g}" if h else "" for h in heights], fontsize=7)
    axes.set_xticks(range(len(models)), models)
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8)


def _written(pyplot: Any, figure: Any, path: Path) -> Path:
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _steps(pyplot: Any, results: Results, model: str, folder: Path) -> Path | None:
    """Every backend's step time at each shape of its first process: first met (dots) and met again (line)."""
    figure, axes = pyplot.subplots(figsize=(7, 3.6))
    drawn = False
    for backend in backends_of(results):
        records = [r for r in records_of(results, model, backend) if r["mode"] == "time" and not r["error"]]
        if not records or len(records[0]["shapes"]) < 2:
            continue
        record = records[0]
        shapes = [tuple(s) for s in record["shapes"]]
        order = sorted(range(len(shapes)), key=lambda i: _volume(shapes[i]))
        fresh = dict(zip(shapes[len(shapes) - len(record["fresh"]):], record["fresh"], strict=True))
        (line,) = axes.plot([_volume(shapes[i]) for i in order], [record["repeated"][i] * 1e3 for i in order],
                            label=f"{backend}, seen", linewidth=1.2)
        met = sorted(fresh, key=_volume)
        axes.scatter([_volume(s) for s in met], [fresh[s] * 1e3 for s in met], s=10, color=line.get_color(),
                     label=f"{backend}, new")
        drawn = True
    if drawn:
        axes.set_yscale("log")
        axes.set_xlabel("product of the sizes")
        axes.set_ylabel("step, ms")
        axes.set_title(model, fontsize=10)
        axes.legend(fontsize=7)
        figure.tight_layout()
    path = folder / f"steps_{''.join(c if c.isalnum() else '_' for c in model)}.png"
    if drawn:
        figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path if drawn else None


def _volume(shape: tuple[int, ...]) -> int:
    product = 1
    for extent in shape:
        product *= extent
    return product
