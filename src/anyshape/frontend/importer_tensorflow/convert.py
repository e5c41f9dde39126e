"""Conversion of a SavedModel to StableHLO by TensorFlow's own converter, and what is said where it cannot.

    convert(folder, "serving_default", "serve")  -->  MLIR's bytecode, with sizes left open
"""
from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from anyshape.base.errors import Unsupported

CONVERTER = "tensorflow.compiler.mlir.tensorflow_to_stablehlo.python.pywrap_tensorflow_to_stablehlo"
MOST_SECONDS = 1800
WHERE = "anyshape.compile_tensorflow"
INSTEAD = "leave it out of the function, or export a Keras model by its JAX backend (docs/tensorflow.md)"


class Refused(Unsupported):
    """TensorFlow's converter does not carry the model."""


def convert(folder: str | Path, signature: str, tag: str) -> bytes:
    """The module of one signature.

    Raises:
        Refused: the converter cannot. Unsupported: this TensorFlow has no such converter.
    """
    spec = importlib.util.find_spec(CONVERTER)
    if spec is None or spec.origin is None:
        raise Unsupported("this version of TensorFlow has no converter to StableHLO", where=WHERE,
                          why=f"there is no {CONVERTER}", do="install tensorflow-cpu 2.20 or newer")
    with tempfile.TemporaryDirectory(prefix="anyshape-tensorflow-") as scratch:
        output = Path(scratch) / "module"
        process = [sys.executable, "-P", str(Path(__file__).with_name("convert_process.py")), spec.origin, str(folder),
                   signature, tag, str(output)]
        try:
            done = subprocess.run(process, capture_output=True, timeout=MOST_SECONDS, check=False)
        except subprocess.TimeoutExpired as error:
            raise Refused("TensorFlow's converter does not end", where=WHERE, why=f"it ran for {MOST_SECONDS} s",
                          do=INSTEAD) from error
        if output.exists() and not done.returncode:
            return output.read_bytes()
        said = output.with_name("module.error")
        if said.exists():
            raise refused(said.read_text("utf-8"))
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        raise Refused("TensorFlow's converter ended without a result", where=WHERE, do=INSTEAD,
                      why=f"exit status {done.returncode}: {last[0][:300]}")


def refused(said: str) -> Refused:
    """The error in the words of the converter, without the nesting of its locations."""
    names = re.findall(r"'tf\.(\w+)'", said)
    place = re.search(r'loc\((?:callsite\()?(?:fused\[)?"([^"@]+)', said)
    why = re.search(r"error: (?:loc\(.*?\)+: )?('[^\n]+|[^\n]+)", said)
    reason = re.sub(r"loc\(.*\): ", "", why[1] if why else said.strip())[:300]
    what = f"TensorFlow's converter has no StableHLO for {names[0]}" if names else \
        "TensorFlow's converter cannot write the model as StableHLO"
    return Refused(what, where=f"{WHERE}: {place[1].rstrip(':')}" if place else WHERE, why=reason, do=INSTEAD)


def left_over(module: bytes) -> Refused:
    """The error for a module that cannot be read: operations of TensorFlow's with attributes that only TensorFlow
    knows. Their names are in the bytecode's table of operations, which stands before all other names."""
    table = module[:module.find(b"tf_saved_model.index_path")]
    names = re.findall(rb"\x00([A-Z][A-Za-z0-9]{2,})(?=\x00)", table)
    found = ", ".join(dict.fromkeys(one.decode() for one in names)) or "some of TensorFlow's operations"
    return Refused(f"TensorFlow's converter has no StableHLO for {found}", where=WHERE, do=INSTEAD,
                   why="it leaves them as they are")
