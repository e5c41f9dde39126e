"""JAX's own cases of its primitives, and StableHLO's own test modules, through our importer: right, wrong or refused.

    python -m anyshape_bench.experiments.stablehlo_cases FOLDER docs/results/stablehlo/stablehlo.json

The cases of primitives are those of the jax wheel (`test_harnesses`), of float32, by `anyshape.jax.jit` with every
size open that JAX leaves open, against XLA's results. FOLDER holds modules of `stablehlo/testdata`: at its top those
that check themselves, in `dynamic/` those with symbolic sizes, whose oracle is the reference interpreter in jaxlib.
Rows are kept beside the results as they come, so that a run that is ended goes on where it was. It takes an hour; what
is stored in docs/results is shown in docs/jax.md.
"""
from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import queue
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from anyshape_bench.harness.machine import commit
from anyshape_bench.harness.marked_part import show_stored

MARK = "cases"
SECONDS = 180  # a case that takes longer hangs
CASES_A_PROCESS = 150  # then its caches are dropped
REACH = 0.9  # of what is in scope
# largest difference, of an element or of the largest one
TOLERANCES = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 2e-5, "complex64": 5e-5, "float64": 1e-10,
              "complex128": 1e-10}
Outcome = tuple[str, str]  # right, wrong, refused, error, or out of scope; and why
Case = tuple[str, Callable[[], Outcome]]


def difference(have: Any, want: Any) -> str:
    """What tells two results apart, in words; empty where nothing does."""
    have, want = np.asarray(have), np.asarray(want)
    if have.dtype != want.dtype or have.shape != want.shape:
        return f"{have.dtype} {have.shape}, not {want.dtype} {want.shape}"
    near = TOLERANCES.get(want.dtype.name)
    if near is None:
        return "" if np.array_equal(have, want) else f"{(have != want).sum()} of {have.size} elements"
    have, want = (one.astype("c16" if one.dtype.kind == "c" else "f8") for one in (have, want))
    known = np.isfinite(want)
    largest = np.abs(want[known]).max() if known.any() else 0.0
    with np.errstate(all="ignore"):
        if np.allclose(have, want, near, near * max(largest, 0.1), equal_nan=True):
            return ""
        return f"by up to {np.nanmax(np.abs(have - want)):.2g} of {largest:.2g}"


def judged(run: Callable[[], Sequence[Any]], wanted: Sequence[Any]) -> Outcome:
    """The outcome of a call of ours, by the results that are wanted."""
    from anyshape.base.errors import AnyShapeError
    try:
        found = run()
    except AnyShapeError as error:
        whole = error.what and error.why and error.do
        return "refused" if whole else "error", f"{error.what}: {error.why}"[:300]
    except Exception as error:  # what is no error of ours is a bug
        return "error", f"{type(error).__name__}: {error}"[:300]
    said = [difference(have, want) for have, want in zip(found, wanted, strict=True)]
    return ("wrong", next(filter(None, said))) if any(said) else ("right", "")


# -- JAX's cases of primitives

def primitives(_: Path) -> list[Case]:
    from jax._src.internal_test_util.test_harnesses import all_harnesses
    return [(one.fullname, partial(primitive, one)) for one in all_harnesses
            if np.dtype(one.dtype) == np.float32]


def primitive(case: Any) -> Outcome:
    """One case: two draws of its arguments, against XLA."""
    import jax

    import anyshape
    if not case.filter("cpu"):
        return "out of scope", "JAX has no kernel for this processor"
    draws = [case.dyn_args_maker(np.random.RandomState(seed)) for seed in (0, 1)]
    try:
        wanted = [leaf for draw in draws for leaf in jax.tree.leaves(jax.jit(case.dyn_fun)(*draw))]
        jax.block_until_ready(wanted)
    except Exception as error:  # a case that JAX itself refuses
        return "out of scope", f"JAX: {error}"[:300]
    fast = anyshape.jax.jit(lambda *given: case.dyn_fun(*given), strict=True)

    def bare(leaf: Any) -> Any:
        return jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    return judged(lambda: [bare(leaf) for draw in draws for leaf in jax.tree.leaves(fast(*draw))],
                  [bare(leaf) for leaf in wanted])


# -- modules that check themselves

def modules(folder: Path) -> list[Case]:
    return [(path.stem, partial(module, path.read_text())) for path in sorted(folder.glob("*.mlir"))]


def module(text: str) -> Outcome:
    """A module that compares results of its function `main` with constants of its function `expected`."""
    import anyshape
    from anyshape.frontend.importer_stablehlo import reader
    alone, checked = separated(text)
    functions = reader.read(text).functions

    def constants(name: str) -> list[Any]:
        body = functions[name].body if name in functions else None
        known = {one.outputs[0]: one.attributes["value"] for one in body.operations} if body else {}
        return [known[name] for name in body.results] if body else []
    expected = constants("expected")

    def run() -> Sequence[Any]:
        found = anyshape.compile_stablehlo(alone)(*constants("inputs"))
        return found if isinstance(found, tuple) else (found,)
    return judged(run, [expected[number] for number in checked])


def separated(text: str) -> tuple[str, list[int]]:
    """The module whose `main` takes what it got from `inputs` and returns what it checked; with which results of
    `expected` that was compared."""
    from anyshape.frontend.importer_stablehlo import reader
    ir = reader.ir
    with reader._context(), ir.Location.unknown():
        whole = ir.Module.parse(text)
        main = next(one.operation for one in whole.body.operations
                    if ir.StringAttr(one.operation.attributes["sym_name"]).value == "main")
        block = main.regions[0].blocks[0]
        calls, checks = {}, []
        for operation in (one.operation for one in block.operations):
            if operation.name == "func.call":
                calls[ir.FlatSymbolRefAttr(operation.attributes["callee"]).value] = operation
            elif operation.name.startswith("check.") or "check.expect" in str(operation):
                checks.append(operation)
        types = []
        if "inputs" in calls:
            for result in calls["inputs"].results:
                types.append(result.type)
                result.replace_all_uses_with(block.add_argument(result.type, ir.Location.unknown()))
        pairs = [(check.operands[0], list(calls["expected"].results).index(check.operands[1])) for check in checks]
        list(block.operations)[-1].operation.erase()
        with ir.InsertionPoint(block):
            ir.Operation.create("func.return", operands=[value for value, _ in pairs])
        for operation in (*checks, *(calls[name] for name in ("inputs", "expected") if name in calls)):
            operation.erase()
        main.attributes["function_type"] = ir.TypeAttr.get(
            ir.FunctionType.get(types, [value.type for value, _ in pairs]))
        for key in ("res_attrs", "arg_attrs"):
            if key in main.attributes:
                del main.attributes[key]
        return str(whole), [number for _, number in pairs]


# -- modules with symbolic sizes

SIZES = (4, 7)  # that every open dim takes, one after the other; one program for both


def dynamic(folder: Path) -> list[Case]:
    return [(path.stem, partial(symbolic, path.read_text()))
            for path in sorted((folder / "dynamic").glob("*.mlir"))]


def symbolic(text: str) -> Outcome:
    """A module with open dims at two sizes, against the reference interpreter in a process of its own."""
    import anyshape
    from anyshape.frontend.importer_stablehlo import reader
    types = reader.read(text).functions["main"].body.types
    calls = [drawn(types, size) for size in SIZES]
    context = multiprocessing.get_context("spawn")
    into = context.Queue()
    process = context.Process(target=interpreted, args=(text, calls, into), daemon=True)
    process.start()
    while process.is_alive() and into.empty():
        time.sleep(0.02)
    try:
        wanted = into.get(timeout=1)
    except queue.Empty:
        return "out of scope", "the interpreter ends the process"
    if isinstance(wanted, str):
        return "out of scope", f"the interpreter: {wanted}"

    def run() -> Sequence[Any]:
        fast = anyshape.compile_stablehlo(text)
        every = [fast(*call) for call in calls]
        return [leaf for found in every for leaf in (found if isinstance(found, tuple) else (found,))]
    return judged(run, wanted)


def drawn(types: Sequence[Any], size: int) -> list[Any]:
    """Arguments: whole numbers without dims before the first open dim are sizes."""
    from anyshape.frontend.symbols.numpy_arrays import numpy_dtype
    draw = np.random.default_rng(size)
    given: list[Any] = []
    first = next((n for n, one in enumerate(types) if one.static is None), len(types))
    for number, one in enumerate(types):
        shape = tuple(size if dim is None else dim for dim in one.shape)
        kind = numpy_dtype(one.dtype)
        if number < first and not shape and kind.kind == "i":
            given.append(np.array(size, kind))
        elif kind.kind in "iub":
            given.append(draw.integers(0, 2 if kind.kind == "b" else 4, shape).astype(kind))
        else:
            given.append((draw.random(shape) + 0.1).astype(kind))
    return given


def refined(text: str, given: Sequence[Any]) -> Any:
    """The module with every size a number, for the interpreter takes few operations without."""
    from jaxlib.mlir import ir, passmanager
    from jaxlib.mlir.dialects import stablehlo
    stablehlo.register_stablehlo_passes()
    whole = ir.Module.parse(text)
    main = next(one.operation for one in whole.body.operations
                if ir.StringAttr(one.operation.attributes["sym_name"]).value == "main")
    block = main.regions[0].blocks[0]
    with ir.InsertionPoint.at_block_begin(block):
        for argument, value in zip(block.arguments, given, strict=True):
            if not value.type.shape and isinstance(value.type.element_type, ir.IntegerType):
                known = ir.Operation.create("stablehlo.constant", results=[value.type], attributes={"value": value})
                argument.replace_all_uses_with(known.results[0])
    types = ",".join(str(one.type) for one in given)
    passmanager.PassManager.parse(
        f"builtin.module(stablehlo-refine-arguments{{types={types}}},stablehlo-refine-shapes,"
        "func.func(stablehlo-canonicalize-dynamism),stablehlo-refine-shapes)").run(whole.operation)
    return whole


def evaluated(module: Any, attributes: Sequence[Any]) -> list[np.ndarray]:
    """What the interpreter gives. Its bindings hand over neither complex numbers nor those of 16 bits: their parts, or
    their bits, are returned instead."""
    import ml_dtypes
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo
    main = next(one.operation for one in module.body.operations
                if ir.StringAttr(one.operation.attributes["sym_name"]).value == "main")
    given = list(main.regions[0].blocks[0].operations)[-1]
    kinds = [str(ir.RankedTensorType(one.type).element_type) for one in given.operands]
    kept: list[Any] = []
    with ir.InsertionPoint(given):
        for value, kind in zip(given.operands, kinds, strict=True):
            shape = ir.RankedTensorType(value.type).shape
            if kind.startswith("complex"):
                half = ir.RankedTensorType.get(shape, ir.ComplexType(ir.RankedTensorType(value.type).element_type)
                                               .element_type)
                kept += [ir.Operation.create(f"stablehlo.{part}", results=[half], operands=[value]).results[0]
                         for part in ("real", "imag")]
            elif kind == "bf16":
                bits = ir.RankedTensorType.get(shape, ir.IntegerType.get_unsigned(16))
                kept.append(ir.Operation.create("stablehlo.bitcast_convert", results=[bits],
                                                operands=[value]).results[0])
            else:
                kept.append(value)
        ir.Operation.create("func.return", operands=kept)
    given.operation.erase()
    main.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(
        [one.type for one in main.regions[0].blocks[0].arguments], [one.type for one in kept]))
    if "res_attrs" in main.attributes:
        del main.attributes["res_attrs"]
    found = iter([np.array(one) for one in stablehlo.eval_module(module, list(attributes))])
    return [next(found) + 1j * next(found) if kind.startswith("complex") else
            next(found).view(ml_dtypes.bfloat16) if kind == "bf16" else next(found) for kind in kinds]


def attribute_of(array: np.ndarray) -> Any:
    """An argument of the interpreter."""
    from jaxlib.mlir import ir
    make: Any = ir.DenseElementsAttr.get
    if array.dtype == bool:  # a byte for each: bits of a byte would be taken for one value of all elements, or refused
        return make(array, type=ir.IntegerType.get_signless(1))
    if array.dtype.name == "bfloat16":
        return make(array.view(np.uint16), shape=array.shape, type=ir.BF16Type.get())
    return make(array, signless=array.dtype.kind != "u")


def interpreted(text: str, calls: Sequence[Sequence[Any]], into: Any) -> None:
    """One process: puts the results, or what the interpreter says."""
    from jax._src.interpreters.mlir import make_ir_context
    from jaxlib.mlir import ir
    try:
        found = []
        for call in calls:
            with make_ir_context(), ir.Location.unknown():
                attributes = [attribute_of(one) for one in call]
                found += evaluated(refined(text, attributes), attributes)
        into.put(found)
    except Exception as error:  # whatever it says
        into.put(f"{type(error).__name__}: {error}"[:300])


# -- all of them

SUITES: dict[str, tuple[str, Callable[[Path], list[Case]]]] = {
    "primitives": ("primitives of JAX, float32, against XLA", primitives),
    "modules": ("StableHLO's modules that check themselves", modules),
    "dynamic": ("StableHLO's modules with symbolic sizes, against its interpreter", dynamic)}


def worker(folder: Path, suite: str, every: int, start: int, into: Any) -> None:
    """One process: cases from one on; puts their rows."""
    warnings.simplefilter("ignore")
    for number, (name, run) in list(enumerate(SUITES[suite][1](folder)[::every]))[start:start + CASES_A_PROCESS]:
        try:
            outcome, why = run()
        except Exception as error:  # what is not read at all
            outcome, why = "error", f"{type(error).__name__}: {error}"[:300]
        into.put({"suite": suite, "number": number, "case": name, "outcome": outcome, "why": why})
    into.put(None)


def rows_of(folder: Path, suite: str, every: int, start: int) -> Iterator[dict[str, Any]]:
    """Every case from one on, in processes of their own; one that ends its process is an error, and so is a hang."""
    names = [name for name, _ in SUITES[suite][1](folder)[::every]]
    context = multiprocessing.get_context("spawn")
    while start < len(names):
        into = context.Queue()
        process = context.Process(target=worker, args=(folder, suite, every, start, into))
        process.start()
        last = min(start + CASES_A_PROCESS, len(names))
        while start < last:
            row = next_row(into, process)
            if isinstance(row, str):
                yield {"suite": suite, "number": start, "case": names[start], "outcome": "error", "why": row}
                start += 1
                break
            yield row
            start += 1
        process.kill()
        process.join()


def next_row(into: Any, process: Any) -> Any:
    """A row, or why none comes."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        alive = process.is_alive()
        try:
            return into.get(timeout=0.2)
        except queue.Empty:
            if not alive:
                return f"the process ended with code {process.exitcode}"
    return f"nothing came in {SECONDS} s"


def table(found: dict[str, Any]) -> str:
    """The results in Markdown."""
    lines = ["| cases | run | in scope | right | wrong | refused | errors | right, of those in scope |",
             "|---|---:|---:|---:|---:|---:|---:|---:|"]
    ends = []
    for suite, (title, _) in SUITES.items():
        counts = collections.Counter(found["counts"][suite])
        scope = counts.total() - counts["out of scope"]
        share = counts["right"] / max(scope, 1)
        lines.append(f"| {title} | {counts.total()} | {scope} | {counts['right']} | {counts['wrong']} | "
                     f"{counts['refused']} | {counts['error']} | {share:.1%} |")
        ends.append(share >= REACH and not counts["wrong"])
    end = "reached" if all(ends) else "short"
    commits = " and ".join(f"{one} ({', '.join(suite for suite in SUITES if found['commits'][suite] == one)})"
                           for one in dict.fromkeys(found["commits"].values()))
    said = (f"At least {REACH:.0%} right and none wrong: {end}. Out of scope is what XLA or the interpreter "
            f"does not do. jax {found['jax']}, commit {commits}.")
    left: dict[Any, list[str]] = collections.defaultdict(list)
    for row in found["left"]:
        if row["outcome"] != "out of scope":
            left[row["outcome"], reason(row["why"])].append(row["case"])
    whys = [f"- {outcome}: {why}: {', '.join(f'`{one[:60]}`' for one in cases[:3])}"
            f"{f' and {len(cases) - 3} more' if len(cases) > 3 else ''}" for (outcome, why), cases in left.items()]
    return "\n".join([*lines, "", said, "", *whys, *([""] if whys else [])])


def reason(why: str) -> str:
    """The first line of it, without the place in this file."""
    return re.sub(r" \(/[^)]*\)", "", why.partition("\n")[0]).removeprefix("<lambda> cannot be compiled: ")[:120]


def study(folder: Path, kept: Path, only: Sequence[str], every: int, before: dict[str, Any] | None = None
          ) -> dict[str, Any]:
    """How many there are of each outcome, and the rows that are not right. Rows are kept as they come.

    Args:
        before: a study whose suites stay where they are not run.
    """
    import jax
    rows = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    with kept.open("a", encoding="utf-8") as file:
        for suite in only or SUITES:
            start = sum(row["suite"] == suite for row in rows)
            for row in rows_of(folder, suite, every, start):
                rows.append(row)
                file.write(json.dumps(row) + "\n")
                file.flush()
    found: dict[str, Any] = {"counts": {}, "left": [], "jax": jax.__version__, "commits": {}}
    for suite in SUITES:
        if before is None or not only or suite in only:
            its = [row for row in rows if row["suite"] == suite]
            found["counts"][suite] = dict(collections.Counter(row["outcome"] for row in its))
            found["commits"][suite] = commit()
        else:
            its = [row for row in before["left"] if row["suite"] == suite]
            found["counts"][suite], found["commits"][suite] = before["counts"][suite], before["commits"][suite]
        found["left"] += [row for row in its if row["outcome"] != "right"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the modules are")
    parser.add_argument("path", type=Path, help="where the results are written, as JSON")
    parser.add_argument("--every", type=int, default=1, help="of how many cases one is run")
    parser.add_argument("--only", nargs="*", default=(), choices=SUITES, help="the others stay as they are stored")
    given = parser.parse_args()
    given.path.parent.mkdir(parents=True, exist_ok=True)
    kept = given.path.with_suffix(".rows")
    before = json.loads(given.path.read_text(encoding="utf-8")) if given.path.exists() else None
    found = study(given.folder, kept, given.only, given.every, before)
    print(table(found))
    given.path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    kept.unlink()
    show_stored(given.path, "jax.md", MARK, table(found))


if __name__ == "__main__":
    main()
