"""The rules of the house: imports run one way, torch only in its rooms, one place reads the environment, sizes."""
from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "anyshape"
FILES = sorted(path for path in SOURCE.rglob("*.py"))

# a package imports from packages before it, and from itself; imports inside functions and for type checking count
ORDER = tuple("""
base  sym
torch_compat  torch_compat/versions  torch_compat/tracing  torch_compat/dynamo
route/core  route/profile  route/flow  route/store  route/preload  route/placement  route/speculate  route/report
route/optimize  route
ir  ops  passes  passes/attention  passes/routing  passes/gemm  passes/driver
dist  dist/cost  dist/pipeline  dist/simulate  dist/search
kernel/loop_ir  kernel/schedule  kernel/lowering  kernel/fusion  kernel
plan/ir  plan/memory  plan/remat  plan/schedule  plan  plan/driver
backend  backend/cpu/native  backend/cpu/machine  backend/cpu/llvm  backend/cpu/codegen
backend/cpu/microkernels/tables  backend/cpu/microkernels
backend/cpu/bytecode  backend/cpu/routines  backend/cpu/routines/convolution
backend/cpu/routines/recurrence  backend/cpu/routines/encoding  backend/cpu
backend/triton/codegen  backend/triton/driver  backend/triton
runtime/driver  runtime/memory  runtime/context  runtime/numpy_ops  runtime/torch_ops/onnx  runtime/torch_ops
runtime/collectives  runtime/cost  runtime/specialize  runtime/call  runtime/budget  runtime/inspect  runtime
compiler  artifact/format  artifact
frontend/symbols  frontend/aten  frontend/recurrent  frontend/messages
frontend/attention_fusion  frontend/autograd  frontend/importer
frontend/importer_onnx  frontend/importer_onnx_ml  frontend/programs  frontend/diagnostics
frontend/diagnostics/report  frontend/onnx_program
frontend/importer_stablehlo  frontend/importer_tensorflow  frontend/jax_jit  frontend/strategy  frontend/train_step
frontend/checkpoint
frontend/capture  frontend/warm_start  frontend/callables  frontend
.  tools  tools/demo/show  tools/demo  tools/serve
""".split())
RANK = {name: rank for rank, name in enumerate(ORDER)}
STRANGERS = ("sym torch_compat", "ops passes kernel plan")  # rooms that know nothing of each other
FULL = 16  # files of a folder; beyond that it wants folders of its own
TORCH_ROOMS = ("frontend", "runtime", "route", "tools", "torch_compat")
# the front names torch's classes, for type checkers; what torch's libraries do, and its allocator of device memory
TORCH_FILES = ("__init__.py", "backend/cpu/machine/torch_libs.py", "backend/cpu/autotune.py",
               "backend/triton/torch_memory.py")
# (file, what) that may be caught broadly: the front-end's fallback, the tools, and borders that raise again
BORDERS = ("frontend/", "tools/", "route/speculate/", "backend/cpu/native_routines.py", "backend/triton/runner.py",
           "runtime/call/executable.py", "artifact/format/text_limits.py", "artifact/load.py")
# base/config.py reads every knob; the disk cache asks for the user's cache folder
ENVIRONMENT = ("base/config.py", "base/disk_cache.py")
# private names of torch: the package that looks them up; the demo runs torch's own compiler too
PRIVATE, DEMO = "torch_compat", "tools/demo/"
# attributes that are used only where torch has the names of TRAIN_STEP in torch_compat/names.py
ASKED_FOR = ("_growth_tracker", "_lazy_init_scale_growth_tracker", "_opt_called", "_post_accumulate_grad_hooks",
             "_scale")
LONGEST = 60  # lines of a function
FACE = 8  # names that a package's `__init__` gives to others
# package: why its face is wider
WIDE_FACES = {
    ".": "the doors for users: what can be compiled, saved and planned, one name each",
    "route": "a library for users, who write `from anyshape import route`: cells, routers and plans are one name each",
    "torch_compat": "every file that touches a private name of torch asks by these, as `compat.get(...)`",
}
# (file, function) that is longer; it waits for the rewrite of how a call reaches native code
LONG_FUNCTIONS = (("runtime/call/executable.py", "_run"),)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> list[ast.AST]:
    """All of a file, looked for once."""
    return list(ast.walk(tree(path)))


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def each_file(check: Callable[[Path], None]) -> Callable[[], None]:
    """One test over all files, which names each that breaks the rule: a test for each file would be thousands."""
    def test() -> None:
        broken = []
        for path in FILES:
            try:
                check(path)
            except (AssertionError, pytest.fail.Exception) as fault:
                broken.append(str(fault).splitlines()[0])
        assert not broken, "\n".join(broken)

    test.__name__, test.__doc__ = check.__name__, check.__doc__
    return test


def module_of(path: Path) -> str:
    parts = ["anyshape", *path.relative_to(SOURCE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


def package(module: str) -> str:
    """The package of a module, as a path; "." is the front of all."""
    path = MODULES[module].relative_to(SOURCE)
    return path.parent.as_posix()


def room(module: str) -> str:
    """The package of a module that stands in the front, "" for the front itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and package(module) != "." else ""


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every module that a file imports, in functions and for type checkers too: (name, line). `from a import b` gives
    a.b if it is one."""
    stack: list[ast.AST] = [tree(path)]
    while stack:
        node = stack.pop()
        stack.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = ["anyshape", *path.relative_to(SOURCE).parts[:-1]]
                base = ".".join([*package[:len(package) - node.level + 1], *base.split(".")]).rstrip(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield (inner if inner in MODULES else base), node.lineno


def test_every_package_has_a_rank() -> None:
    assert {package(module) for module in MODULES} == RANK.keys()


@each_file
def test_imports_run_one_way(path: Path) -> None:
    own = package(module_of(path))
    if module_of(path) == "anyshape.__main__":
        return
    for module, line in imports(path):
        if not module.startswith("anyshape"):
            continue
        assert module in MODULES, f"{name_of(path)}:{line} imports {module}, which is no part of the house"
        other = package(module)
        assert own == other or RANK[other] < RANK[own], f"{name_of(path)}:{line} ({own}) imports {module} ({other})"
        rooms = {own.split("/")[0], other.split("/")[0]}
        for strangers in STRANGERS:
            assert len(rooms & set(strangers.split())) < 2, f"{name_of(path)}:{line} imports {module}: strangers"


@each_file
def test_code_generation_reads_loop_programs_and_decides_nothing(path: Path) -> None:
    """What a kernel's schedule is stands on the loop program: code generators need nothing else of `kernel`."""
    if not package(module_of(path)).startswith(("backend/cpu/codegen", "backend/cpu/llvm")):
        return
    for module, line in imports(path):
        if module.startswith("anyshape.kernel."):
            assert package(module) == "kernel/loop_ir", f"{name_of(path)}:{line} imports {module}"


def test_folders_are_not_too_full() -> None:
    for name in ORDER:
        files = [path for path in (SOURCE / name).glob("*.py") if path.name != "__init__.py"]
        assert len(files) <= FULL, f"{name} has {len(files)} files: it wants folders of its own"


def test_no_circles() -> None:
    edges = {module: {name for name, _ in imports(path) if name in MODULES and name != module}
             for module, path in MODULES.items()}
    done: set[str] = set()
    trail: list[str] = []

    def visit(module: str) -> None:
        if module in done:
            return
        assert module not in trail, " -> ".join([*trail[trail.index(module):], module])
        trail.append(module)
        for other in sorted(edges[module]):
            visit(other)
        trail.pop()
        done.add(module)

    for module in sorted(edges):
        visit(module)


@each_file
def test_torch_stays_in_its_rooms(path: Path) -> None:
    if room(module_of(path)) in TORCH_ROOMS or name_of(path) in TORCH_FILES:
        return
    for module, line in imports(path):
        assert module.split(".")[0] not in ("torch", "transformers"), f"{name_of(path)}:{line} imports {module}"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@cache
def own_names() -> set[str]:
    """Names that our own sources define: a private attribute of any other name is somebody else's."""
    found = set()
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) \
                    and isinstance(node.value, ast.Name) and node.value.id == "self":
                found.add(node.attr)
    return found


@each_file
def test_private_names_of_torch_are_looked_up_in_one_package(path: Path) -> None:
    if room(module_of(path)) == PRIVATE or name_of(path).startswith(DEMO):
        return
    say = "look it up with torch_compat.get, and write into torch_compat/names.py what is done without it"
    for module, line in imports(path):
        private = module.split(".")[0] == "torch" and any(map(is_private, module.split(".")))
        assert not private, f"{name_of(path)}:{line} imports {module}: {say}"
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                assert not is_private(alias.name), f"{name_of(path)}:{node.lineno} imports {alias.name}: {say}"
        if not isinstance(node, ast.Attribute) or not is_private(node.attr):
            continue
        operator = isinstance(node.value, ast.Name) and node.value.id == "aten"  # torch_compat.aten
        assert operator or node.attr in own_names() or node.attr in ASKED_FOR or ast.unparse(node) == "sys._getframe", \
            f"{name_of(path)}:{node.lineno} reads {ast.unparse(node)}: {say}"


@each_file
def test_nothing_is_caught_broadly(path: Path) -> None:
    if name_of(path).startswith(BORDERS):
        return
    for node in nodes(path):
        if isinstance(node, ast.ExceptHandler):
            names = [n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)] if node.type else ["everything"]
            broad = {"Exception", "BaseException", "everything"} & set(names)
            assert not broad, f"{name_of(path)}:{node.lineno} catches {broad}"


@each_file
def test_the_environment_is_read_in_one_place(path: Path) -> None:
    if name_of(path) in ENVIRONMENT:
        return
    for node in nodes(path):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv"):
            pytest.fail(f"{name_of(path)}:{node.lineno} reads the environment; make it a field of Config")


@each_file
def test_homes_of_buffers_are_asked_by_class(path: Path) -> None:
    if package(module_of(path)) == "plan/ir":  # which has their words, in texts
        return
    for node in nodes(path):
        if isinstance(node, ast.Compare):
            parts = [one for side in (node.left, *node.comparators) for one in ast.walk(side)]
            home = any("home" in (getattr(one, "attr", ""), getattr(one, "id", "")) for one in parts)
            word = any(isinstance(one, ast.Constant) and isinstance(one.value, str) for one in parts)
            assert not (home and word), f"{name_of(path)}:{node.lineno} compares a home with a string: ask the `Buffer`"


@each_file
def test_a_file_says_what_it_is_for_in_readable_lines(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert not lines or ast.get_docstring(tree(path)), f"{name_of(path)} does not say what it is for"
    wide = [number for number, line in enumerate(lines, 1) if len(line) > 120]
    assert not wide, f"{name_of(path)}: lines {wide} are wider than 120 columns"


def face(path: Path) -> list[str]:
    """The names that a package gives to others: its `__all__`, else the public functions and classes that its
    `__init__` defines. What it imports for itself is no part of its face."""
    for node in tree(path).body:
        if isinstance(node, ast.Assign) and any(ast.unparse(one) == "__all__" for one in node.targets):
            return list(ast.literal_eval(node.value))
    return [node.name for node in tree(path).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))
            and not node.name.startswith("_")]


def test_a_package_has_a_face_of_few_names() -> None:
    faces = {package(module_of(path)): face(path) for path in FILES if path.name == "__init__.py"}
    wide = {name: len(names) for name, names in faces.items() if len(names) > FACE}
    assert wide.keys() == WIDE_FACES.keys(), f"faces of more than {FACE} names: {wide}"


@each_file
def test_functions_are_not_too_long(path: Path) -> None:
    found = {(node.name, node.end_lineno - node.lineno + 1) for node in nodes(path)
             if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno}
    long = [(name, lines) for name, lines in sorted(found)
            if lines > LONGEST and (name_of(path), name) not in LONG_FUNCTIONS]
    assert not long, f"{name_of(path)}: functions longer than {LONGEST} lines: {long}"


def test_importing_loads_little_and_leaves_torch_alone() -> None:
    program = ("import sys; before = len(sys.modules); import anyshape; loaded = len(sys.modules) - before; "
               "print(loaded, 'torch' in sys.modules, 'llvmlite' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True,
                          env={"PYTHONPATH": str(SOURCE.parent), "PATH": ""})
    loaded, torch_is_there, llvm_is_there = done.stdout.split()
    assert int(loaded) < 100 and torch_is_there == "False" and llvm_is_there == "False"


def test_the_core_works_without_torch() -> None:
    program = ("import sys; sys.modules['torch'] = None; import anyshape.ops.table\n"
               "from anyshape.passes.driver import pipeline; from anyshape.ir.parse import parse; "
               "from anyshape.ir.show import show; from anyshape.base.config import Config\n"
               "g = parse('graph g(x: f32[n])\\n  y = mul(x, 1.0)  f32[n]\\n  z = exp(y)  f32[n]\\n  return z\\n')\n"
               "print(show(pipeline.run(pipeline.ROAD, g, Config(check=1))))")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True,
                          env={"PYTHONPATH": str(SOURCE.parent), "PATH": ""})
    assert "z = exp(x)" in done.stdout


# ---- the benchmarks, a package of their own

BENCH = SOURCE.parents[1] / "benchmarks" / "anyshape_bench"
BENCH_FILES = sorted(BENCH.rglob("*.py"))
# folders by rank: what is measured and how it is run and shown, then the experiments, then the command
BENCH_RANK = {"models": 0, "routes": 1, "harness": 2, "measure": 1, "experiments": 3, "command": 4, "": 5}


def bench_module(path: Path) -> str:
    return ".".join(["anyshape_bench", *path.relative_to(BENCH).with_suffix("").parts]).removesuffix(".__init__")


def bench_imports(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{bench_module(path)} imports relatively"
            known = {bench_module(one) for one in BENCH_FILES}
            yield from (inner if (inner := f"{node.module}.{alias.name}") in known else node.module or ""
                        for alias in node.names)


def test_the_package_asks_for_the_benchmarks_in_one_place() -> None:
    found = [name_of(path) for path in FILES if "anyshape_bench" in path.read_text(encoding="utf-8")]
    assert found == ["tools/bench_package.py"]


def test_the_benchmarks_import_one_way_and_have_no_circles() -> None:
    def rank(module: str) -> int:
        return BENCH_RANK[(module.split(".") + [""])[1]] if module != "anyshape_bench.__main__" else BENCH_RANK[""]

    edges = {bench_module(path): [one for one in bench_imports(path) if one.startswith("anyshape_bench")]
             for path in BENCH_FILES}
    for module, others in edges.items():
        for other in others:
            assert rank(other) <= rank(module) or other == "anyshape_bench", f"{module} imports {other}"
    done: list[str] = []
    while left := [module for module in edges if module not in done]:
        free = [one for one in left if all(other in done or other not in edges for other in edges[one])]
        assert free, f"a circle among {left}"
        done += free


@pytest.mark.parametrize("path", BENCH_FILES, ids=bench_module)
def test_a_file_of_the_benchmarks_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(tree(path)), f"{path.name} does not say what it is for"
    assert len([one for one in path.parent.iterdir() if one.is_file()]) <= 16, f"too many files in {path.parent}"
    if path.relative_to(BENCH).as_posix() != "harness/runner.py":  # which starts processes
        assert not any(isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv")
                       for node in nodes(path)), f"{path.name} reads the environment"
