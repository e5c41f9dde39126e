"""Graphs of the benchmark's models as they were captured, and what the compiler makes of them, without torch's tracer.

    python tests/recorded.py record          captures the graphs again (when the front end changes what it hands on)
    python tests/recorded.py texts FOLDER    writes every kernel and plan to FOLDER, to compare two revisions by diff
    python tests/recorded.py compare A B     compares two such folders, where kernels have other names

The graphs are in tests/corpus/recorded; test_replay.py compares digests of the texts with tests/golden/replay.
"""
from __future__ import annotations

import difflib
import hashlib
import lzma
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from anyshape.backend.cpu.codegen.kernel import emit
from anyshape.backend.cpu.machine.target import target_of
from anyshape.backend.targets import usual_target
from anyshape.base.config import Config
from anyshape.compiler.build_plan import assemble
from anyshape.compiler.driver import fused, named
from anyshape.ir.parse import parse
from anyshape.kernel.loop_ir.program import LoopProgram
from anyshape.kernel.loop_ir.show import show as show_kernel
from anyshape.passes.driver import pipeline
from anyshape.plan.driver import pipeline as plan_pipeline
from anyshape.plan.ir.context import PlanContext
from anyshape.plan.ir.program import Plan
from anyshape.plan.ir.show import show as show_plan
from anyshape.plan.memory.alloc_free_steps import insert_alloc_free
from anyshape.plan.memory.output_as_scratch import alias_buffers
from anyshape.plan.memory.symbolic_allocator import allocate
from anyshape.plan.schedule.launch_grouping import group_launches
from anyshape.plan.schedule.reorder import reorder

NAME = r"\bk[0-9a-f]{20}(?![0-9a-f])"  # of a kernel, see content_name
FOLDER = Path(__file__).parent / "corpus" / "recorded"
MODELS = ("llama", "bert", "gpt2-decode", "resnet", "vit", "conformer", "t5", "dlrm", "mixtral")
LINUX = "x86_64-unknown-linux-gnu"
AVX2 = frozenset({"avx2", "fma"})
AVX512 = AVX2 | {"avx512f", "avx512dq", "avx512bw", "avx512vl"}
PASSES = (reorder, alias_buffers, group_launches, allocate, insert_alloc_free)
TARGETS = {"avx512": target_of(LINUX, "znver4", AVX512), "avx2": target_of(LINUX, "haswell", AVX2)}


def plans(model: str) -> list[Plan]:
    """The plans of a model's graphs."""
    return [made for _, made in compiled(model) if isinstance(made, Plan)]


def texts(model: str) -> Iterator[tuple[str, str]]:
    """(title, text) of everything that the compiler makes of a model's graphs: loops, LLVM per target, plans."""
    for title, made in compiled(model):
        if isinstance(made, Plan):
            yield title, show_plan(made)
            continue
        yield f"{title} loops", show_kernel(made)
        for name, target in TARGETS.items():
            yield f"{title} {name}", emit(made, target)


def compiled(model: str) -> Iterator[tuple[str, LoopProgram | Plan]]:
    """(title, what is made) of everything that the compiler makes of a model's graphs."""
    config = Config()
    before: Plan | None = None
    for path in sorted(FOLDER.glob(f"{model}.*.txt.xz"), key=lambda path: "backward" in path.name):
        graph = pipeline.run(pipeline.ROAD, parse(lzma.decompress(path.read_bytes()).decode()), config)
        store, fusion = fused(graph, usual_target(), config)
        regimes, programs = named(fusion, graph.facts, usual_target())
        for name, program in programs.items():
            yield f"{graph.name} {name}", program
        plan, *_ = plan_pipeline.run(PASSES, (assemble(graph, fusion, store, regimes),), PlanContext(forward=before))
        before = plan if graph.name.endswith("forward") else None
        yield f"{graph.name} plan", plan


def digests(model: str) -> str:
    """One line for each text of `texts`."""
    return "".join(f"{title}  {hashlib.sha256(text.encode()).hexdigest()[:16]}\n" for title, text in texts(model))


def record() -> None:
    """Captures the graphs of all models, at two shapes each, as the benchmark does."""
    import anyshape
    from anyshape_bench.models import bench_models
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            model = bench_models.load(name)
            step = model.make(lambda module, folder=folder: anyshape.compile(module, dump=folder))
            for shape in model.shapes[:2]:
                step(model.inputs(shape))
            for path in Path(folder).glob("*/00_capture.txt"):
                lines = path.read_text(encoding="utf-8").split("\n")
                text = "\n".join(line for line in lines if not line.startswith("# stage"))
                (FOLDER / f"{name}.{path.parent.name}.txt.xz").write_bytes(lzma.compress(text.encode(), preset=9))
        print(name, flush=True)


def by_place(folder: Path) -> dict[tuple[str, str], str]:
    """The texts of a folder by model and title, with the kernels' names replaced by their numbers in the plans."""
    found = {}
    for model in sorted(folder.iterdir()):
        paths = sorted(model.iterdir())
        names = re.findall(NAME, "".join(path.read_text("utf-8") for path in paths if path.name.endswith(".plan.txt")))
        numbers = {name: f"K{number}" for number, name in enumerate(dict.fromkeys(names))}
        for path in paths:
            title, text = (re.sub(NAME, lambda name, numbers=numbers: numbers.get(name[0], name[0]), each)
                           for each in (path.name, path.read_text("utf-8")))
            found[model.name, title] = text
    return found


def compare(first: Path, second: Path) -> None:
    """Prints the lines that differ between two folders of texts, each kind of difference once, with its number."""
    old, new = by_place(first), by_place(second)
    kinds: Counter[str] = Counter()
    for place in sorted(old.keys() | new.keys()):
        lines = list(difflib.unified_diff(old.get(place, "").split("\n"), new.get(place, "").split("\n"), n=0,
                                          lineterm=""))[2:]
        changed = [re.sub(r"\d+", "N", line) for line in lines if not line.startswith("@@")]
        if changed:
            kinds["\n".join([place[1].split(".")[-2], *changed])] += 1
    for kind, count in kinds.most_common():
        print(f"{count} of {kind}")
    print(f"{len(old)} texts and {len(new)}, {kinds.total()} differ")


def main() -> None:
    if sys.argv[1:] == ["record"]:
        record()
    elif sys.argv[1:2] == ["texts"] and len(sys.argv) == 3:
        for model in MODELS:
            for title, text in texts(model):
                path = Path(sys.argv[2]) / model / f"{title.replace(' ', '.')}.txt"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text + "\n", encoding="utf-8")
    elif sys.argv[1:2] == ["compare"] and len(sys.argv) == 4:
        compare(*map(Path, sys.argv[2:]))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
