"""Triton text of a kernel: a Python module with a Triton function for each form, and a head that says how they are run.

    # kernel k3f..(p0: f32, p1: f32; n0, n1)
    # small n0*n1
    # version row1024 k3f.._tile where -n1 + 1024 with C=1024, R=1 grid n0 warps 4

The head is read back (`read`): the text alone is what is compiled, cached and shown. `small`: what must be below 2^31
for 32-bit offsets, "?" where that is not known. `steps`: the sizes that the strides of rows are made of.
"""
from __future__ import annotations

import re
from collections.abc import Sequence

from anyshape.backend.triton.codegen.fold import FoldPrinter
from anyshape.backend.triton.codegen.form import Form
from anyshape.backend.triton.codegen.gemm import ProductPrinter
from anyshape.backend.triton.codegen.kernel import Printer
from anyshape.backend.triton.codegen.scalars import functions
from anyshape.backend.triton.codegen.scatter import ScatterPrinter
from anyshape.backend.triton.codegen.window import WindowPrinter
from anyshape.backend.triton.kernel import KernelSource, KernelVersion
from anyshape.base.errors import VerifyError
from anyshape.kernel.loop_ir.directives import Product, SplitReduction
from anyshape.kernel.loop_ir.program import LoopProgram
from anyshape.sym import parse as size_text
from anyshape.sym.expr import Size

_IMPORTS = "import triton\nimport triton.language as tl\nfrom triton.language.extra import libdevice\n\n\n"
_KERNEL = re.compile(r"# kernel (\w+)\((.*); (.*)\)$", re.MULTILINE)
_SMALL = re.compile(r"# small (.*)$", re.MULTILINE)
_STEPS = re.compile(r"# steps (.*)$", re.MULTILINE)
_VERSION = re.compile(r"# version (\w+) (\w+) where (.*) with (.*) grid (.*) warps (\d+) scratch (.*) window (\d+)$",
                      re.MULTILINE)


def function_text(program: LoopProgram, form: Form, name: str) -> str:
    """The Triton function of a program in a form.

    Raises:
        VerifyError: the form does not fit the program.
    """
    split = program.directive(SplitReduction)
    if split is not None:
        return FoldPrinter(program, form, split).text(name)
    product = program.directive(Product)
    if product is not None:
        return ProductPrinter(program, form, product).text(name)
    kind = ScatterPrinter if form.buckets else WindowPrinter if form.window else Printer
    return kind(program, form).text(name)


def module_text(program: LoopProgram, functions_: Sequence[str], versions: Sequence[KernelVersion],
                small: Sequence[Size] | None, steps: Sequence[str]) -> str:
    """The text of a kernel with these functions and versions: a head that `read` reads back, and a Python module."""
    params = ", ".join(f"{param.name}: {param.dtype}" for param in program.params)
    head = [f"# kernel {program.name}({params}; {', '.join(program.sizes)})",
            f"# small {'?' if small is None else ' | '.join(map(str, small))}", f"# steps {', '.join(steps)}"]
    for version in versions:
        conditions = " | ".join(map(str, version.conditions))
        constants = ", ".join(f"{name}={value}" for name, value in version.constants)
        head.append(f"# version {version.name} {version.function} where {conditions} with {constants} "
                    f"grid {version.grid} warps {version.warps} scratch {version.scratch} "
                    f"window {version.window}")
    body = "\n\n".join(functions_)
    return "\n".join(head) + "\n" + _IMPORTS + functions(body) + body


def read(text: str) -> KernelSource:
    """The kernel of a text.

    Raises:
        VerifyError: it has no head of a kernel.
    """
    found, small, steps = _KERNEL.search(text), _SMALL.search(text), _STEPS.search(text)
    if found is None or small is None or steps is None:
        raise VerifyError("a text without a kernel", why="it has no head `# kernel NAME(PARAMS; SIZES)`",
                          do="report this as a bug of the compiler")
    versions = []
    for line in _VERSION.finditer(text):
        name, function, conditions, constants, grid, warps, scratch, window = line.groups()
        pairs = [one.split("=") for one in constants.split(", ")]
        versions.append(KernelVersion(
            name, function, tuple(size_text.parse(one) for one in conditions.split(" | ") if one),
            tuple((key, int(value)) for key, value in pairs), size_text.parse(grid), int(warps),
            scratch=size_text.parse(scratch), window=int(window)))
    params = tuple(tuple(one.split(": ")) for one in found[2].split(", ") if one)
    return KernelSource(found[1], params, tuple(one for one in found[3].split(", ") if one),  # type: ignore[arg-type]
                        tuple(versions), None if small[1] == "?" else tuple(
                            size_text.parse(one) for one in small[1].split(" | ")),
                        tuple(one for one in steps[1].split(", ") if one), text)
