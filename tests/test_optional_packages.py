"""Optional dependencies: where one is missing it is said who needs it and what to install, and all else works."""
from __future__ import annotations

import pytest

from deploying import alone

DOORS = {
    "compile": "(lambda x: x)", "compile_onnx": "(b'')", "compile_jax": "(None)", "compile_stablehlo": "('')",
    "compile_tensorflow": "(None)",
    "train_step": "(None, None, None)", "strategy": "(None, None, None, None, world=8)", "save": "(None, 'x')",
}

# extras that bring what a door reads, and torch
BY = {"compile_onnx": "onnx", "compile_jax": "jax", "compile_stablehlo": "jax", "compile_tensorflow": "tensorflow"}


def test_without_torch_every_door_says_what_to_install() -> None:
    tries = "".join(f"""
for call in (lambda: anyshape.{name}{arguments},):
    try:
        call()
    except anyshape.AnyShapeError as error:
        print({name!r}, "|", error.what, "|", error.do)""" for name, arguments in DOORS.items())
    said = alone("import anyshape\n" + tries).splitlines()
    assert said == [f"{name} | anyshape.{name} needs the package torch | pip install 'anyshape[{extra}]'"
                    for name in DOORS for extra in (BY.get(name, "torch"),)]


@pytest.mark.parametrize("command, package, extra", [
    ("demo", "torch", "demo"), ("bench", "rich", "bench"),
    ("explain x.py:f", "torch", "torch"), ("compile model.onnx -o model.any", "torch", "onnx")])
def test_without_a_package_a_command_says_what_to_install(command: str, package: str, extra: str) -> None:
    said = alone(f"""
        import contextlib, io
        from anyshape.tools.cli import main
        with contextlib.redirect_stderr(io.StringIO()) as told:
            code = main({command.split()!r})
        print(code, told.getvalue())
        """, blocked=(package,))
    assert said.startswith("1 error: anyshape") and f"needs the package {package}" in said
    assert f"pip install 'anyshape[{extra}]'" in said


def test_without_the_packages_of_importers_programs_of_pytorch_are_saved() -> None:
    said = alone("""
        import tempfile, torch, anyshape
        program = torch.export.export(torch.nn.Linear(3, 2).eval(), (torch.ones(4, 3),),
                                      dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
        with tempfile.TemporaryDirectory() as folder:
            print(anyshape.save(anyshape.compile(program), folder + "/model.any").name)
        for door in (anyshape.compile_onnx, anyshape.compile_stablehlo, anyshape.jax.jit, anyshape.compile_tensorflow):
            try:
                door("")
            except anyshape.AnyShapeError as error:
                print(error.what, "|", error.do)
        """, blocked=("onnx", "onnxruntime", "jax", "jaxlib", "tensorflow"))
    assert said.splitlines() == [
        "model.any", "anyshape.compile_onnx needs the package onnx | pip install 'anyshape[onnx]'",
        "anyshape.compile_stablehlo needs the package jaxlib | pip install 'anyshape[jax]'",
        "anyshape.jax.jit needs the package jaxlib | pip install 'anyshape[jax]'",
        "anyshape.compile_tensorflow needs the package jaxlib | pip install 'anyshape[tensorflow]'"]
