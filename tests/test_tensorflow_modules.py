"""Modules that TensorFlow's converter made (tests/tensorflow_modules.py): one program for all sizes, with TensorFlow's
results. TensorFlow is not needed."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from jaxlib.mlir import ir

import anyshape
from anyshape.base.errors import InputError, Unsupported
from anyshape.frontend.importer_stablehlo import reader
from anyshape.frontend.importer_tensorflow.convert import left_over, refused

FOLDER = Path(__file__).parent / "converted"


def is_read_by_jaxlib(source: bytes) -> bool:
    """MLIR's bytecode of an operator may hold other fields in a later version."""
    context = reader._context()
    try:
        with context, ir.Location.unknown():
            ir.Module.parse(source, context)
    except ir.MLIRError:
        return False
    return True


@pytest.mark.parametrize("name", sorted(one.stem for one in FOLDER.glob("*.mlirbc")))
def test_a_module_of_tensorflow(name: str) -> None:
    source = (FOLDER / f"{name}.mlirbc").read_bytes()
    if not is_read_by_jaxlib(source):  # such as custom calls, by jaxlib 0.12
        with pytest.raises(InputError, match="as a portable artefact or as text"):
            anyshape.compile_stablehlo(source)
        return
    run = anyshape.compile_stablehlo(source)
    programs = anyshape.stats()["programs"]
    with np.load(FOLDER / f"{name}.npz") as arrays:
        for call in (0, 1):
            found = run.results_of([arrays[f"{call}.{label}"] for label, _ in run.arguments])
            for label, value in zip(run.labels, found, strict=True):
                wanted = arrays[f"{call}.{label}"]
                assert value.dtype == wanted.dtype and value.shape == wanted.shape
                np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-5)
    assert anyshape.stats()["programs"] == programs


def test_bytecode_that_jaxlib_cannot_read_is_refused_in_words() -> None:
    source = (FOLDER / "moved.mlirbc").read_bytes()
    with pytest.raises(InputError, match=r"MLIR23.*jaxlib [0-9]") as error:
        anyshape.compile_stablehlo(source[:-200])
    assert "portable artefact" in str(error.value)


def test_texts_are_refused_in_words() -> None:
    with pytest.raises(Unsupported, match="holds texts"):
        anyshape.compile_stablehlo("func.func @main(%x: tensor<?x!x.string>) -> tensor<?x!x.string> "
                                   "{ return %x : tensor<?x!x.string> }")


def test_what_the_converter_says_is_said_in_four_parts() -> None:
    error = refused("UNKNOWN: <unknown>:0: error: loc(callsite(\"net/length@f\")): failed to legalize operation "
                    "'tf.StringLength' that was explicitly marked illegal")
    assert error.what == "TensorFlow's converter has no StableHLO for StringLength" and error.do and error.why
    assert error.where == "anyshape.compile_tensorflow: net/length"
    assert left_over(b"ML\x00builtin\x00OneHot\x00tf_saved_model.index_path").what.endswith("for OneHot")


def test_two_sizes_that_meet_are_one() -> None:
    run = anyshape.compile_stablehlo((FOLDER / "broadcast.mlirbc").read_bytes())
    shapes = {"a0000": (3, 4), "a0001": (5,)}
    with pytest.raises(anyshape.AnyShapeError, match="s_0_1 == s_1_0"):
        run(*(np.ones(shapes[label], np.float32) for label, _ in run.arguments))
