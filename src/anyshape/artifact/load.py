"""The loader of deployed programs: maps a file and makes a program of it, without torch.

    trust_native=True     plan.txt and the native cache are used as they are: milliseconds, and numpy alone is enough
    trust_native=False    graph.txt is compiled by this process (llvmlite), or was by an earlier one of this user, whose
                          cache has it: nothing in the file becomes code

What a file may do is bounded in either case: its texts are parsed under limits, the graph is verified, and a plan is
judged at every new set of sizes before it runs.
"""
from __future__ import annotations

import gc
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from anyshape.artifact import arrays
from anyshape.artifact.format import safetensors
from anyshape.artifact.format.container import WEIGHTS, Container, member, refused
from anyshape.artifact.format.safetensors import parse_json
from anyshape.artifact.format.signature import Signature, decode
from anyshape.artifact.format.text_limits import parse_graph, parse_plan
from anyshape.artifact.loaded_program import LoadedProgram, Weights
from anyshape.artifact.native_code import NativeCode, native_code
from anyshape.artifact.requirements import FORMAT, MOST_SPECIAL, VERSION, VERSIONS
from anyshape.backend.loaded_code import LoadedKernel
from anyshape.backend.targets import deployment
from anyshape.base.digests import sha256
from anyshape.base.errors import ArtifactError, ConfigError, InputError, printable
from anyshape.plan.ir.program import KernelStep, Plan, parts_of
from anyshape.plan.verify import verify
from anyshape.runtime.context.process_context import Context
from anyshape.runtime.driver.numpy_driver import NumpyDriver
from anyshape.runtime.specialize.shape_binding import renamed

if TYPE_CHECKING:
    from anyshape.base.config import Config
    from anyshape.ir.graph import Graph
    from anyshape.sym.expr import Size

MOST_THREADS = 1024
_compiling = threading.Lock()
deployment()  # every load needs it: it is imported with this module


class ProgramHead(NamedTuple):
    """What format.json says of a program. sizes: (input, dim, size) of calls that it is for; of the first program none.
    weights: (position among the plan's inputs, name). needed: sizes that must be at least 0 in a call."""

    sizes: tuple[tuple[int, int, int], ...]
    signature: Signature
    weights: tuple[tuple[int, str], ...]
    needed: tuple[str, ...]


class Head(NamedTuple):
    """What format.json says."""

    made_with: str
    programs: tuple[ProgramHead, ...]
    digests: Mapping[str, str]


def load(path: str | Path, trust_native: bool = False, threads: int = 0, verify: bool = False,
         seed: int | None = None) -> LoadedModel:
    """Loads a file that `save` wrote; arguments, result and errors are those of `anyshape.load`."""
    if not isinstance(threads, int) or not 0 <= threads <= MOST_THREADS:
        raise ConfigError(f"threads is {threads!r}", why="it is how many threads a call may use",
                          do=f"pass a whole number up to {MOST_THREADS}; 0 is as many as there are cores")
    for name, value in (("trust_native", trust_native), ("verify", verify)):
        if not isinstance(value, bool):  # "false" is a text that is not empty, and would be trusted
            raise ConfigError(f"{name} is {value!r:.80}", why="it is neither True nor False", do="pass one of them")
    container = Container(Path(path))
    try:
        head = read_head(container)
        check_digests(container, head, verify)
        weights = safetensors.decode(container.part(WEIGHTS), f"{container.path}: {WEIGHTS}")
        if {name for one in head.programs for _, name in one.weights} != weights.keys():
            raise refused(str(container.path), "there are weights without a place, or places without weights")
        model = LoadedModel(Programs(container, head, weights, threads, trust_native), (trust_native, threads, verify))
        if seed is not None:
            model.seed(seed)
        return model
    except BaseException:
        container.close()
        raise


def read_head(container: Container) -> Head:
    """What format.json says.

    Raises:
        ArtifactError: it is of another format or version, or broken.
    """
    where = f"{container.path}: format.json"
    found = parse_json(container.data("format.json"), where)
    if found.get("format") != FORMAT:
        raise refused(where, f"the format is {str(found.get('format'))[:80]!r}, not {FORMAT!r}")
    version = found.get("version")
    if version not in VERSIONS or isinstance(version, bool):
        made = found.get("made_with", "")
        raise ArtifactError(f"the file has version {str(version)[:20]!r}, this AnyShape reads versions "
                            f"{VERSION} to {VERSIONS[-1]}",
                            where=where, why=f"it was made with {str(made)[:80]}",
                            do="install a later AnyShape, or save the program again with this one")
    digests = found.get("digests")
    if not isinstance(digests, dict) or digests.keys() != container.places.keys() - {"format.json"}:
        raise refused(where, "it does not have the digests of all members")
    made = found.get("made_with")
    if not isinstance(made, dict):
        raise refused(where, "it does not say what it was made with")
    said = " ".join(f"{name} {number}" for name, number in made.items())
    first = _program_head(found, where)
    special = found.get("special", [])
    if not isinstance(special, list) or len(special) > MOST_SPECIAL or not all(
            isinstance(one, dict) for one in special):
        raise refused(where, "its programs for special sizes are no list")
    others = [_program_head(one, where, first) for one in special]
    return Head(said[:200], (first, *others), digests)


def _program_head(found: Mapping[str, Any], where: str, first: ProgramHead | None = None) -> ProgramHead:
    """What is said of one program. first: of the file, whose arguments and results the others have."""
    weights, needed, sizes = found.get("weights"), found.get("needed"), found.get("sizes", [])
    if not isinstance(weights, list) or not all(
            isinstance(one, list) and len(one) == 2 and type(one[0]) is int and isinstance(one[1], str)
            for one in weights):
        raise refused(where, "it does not say where weights belong")
    if not isinstance(needed, list) or not all(isinstance(one, str) for one in needed):
        raise refused(where, "conditions are no texts")
    signature = decode(found.get("signature"), where)
    if first is not None and not signature.is_like(first.signature):
        raise refused(where, "a program for special sizes takes or gives something else than the first one")
    if not isinstance(sizes, list) or bool(sizes) is (first is None) or not all(
            isinstance(one, list) and len(one) == 3 and all(type(part) is int and part >= 0 for part in one)
            and one[0] < len(signature.inputs) and signature.inputs[one[0]].kind == "array" for one in sizes):
        raise refused(where, "it does not say for which sizes a program is")
    return ProgramHead(tuple((one[0], one[1], one[2]) for one in sizes), signature,
                       tuple((one[0], one[1]) for one in weights), tuple(needed))


def check_digests(container: Container, head: Head, all_bytes: bool) -> None:
    """Raises ArtifactError where a member is not what was saved. The bytes of weights are numbers, whatever they are:
    they are read only where `all_bytes`."""
    for name in container.places.keys() - {"format.json"}:
        if name != WEIGHTS or all_bytes:
            if sha256(container.part(name)).hexdigest() != head.digests[name]:
                raise refused(f"{container.path}: {name}", "its bytes are not those that were saved",
                              "copy the file again")


class Programs:
    """The programs of a file, each made when it is first called.

    Raises (when one is made):
        ArtifactError: it is broken, or cannot be compiled here.
    """

    def __init__(self, container: Container, head: Head, weights: Weights, threads: int,
                 trust_native: bool) -> None:
        self.container, self.head, self.weights, self.threads = container, head, weights, threads
        self.driver = NumpyDriver(threads)
        self.code = native_code(container) if trust_native else None
        self.found: dict[int, LoadedProgram] = {}
        self.lock = threading.Lock()

    def __getitem__(self, number: int) -> LoadedProgram:
        found = self.found.get(number)
        if found is None:
            with self.lock:
                found = self.found.get(number) or self._made(number)
                self.found[number] = found
        return found

    def _made(self, number: int) -> LoadedProgram:
        text = member("plan.txt", number)
        if self.code is None:
            return self._compiled(number)
        return self._program(number, *_loaded(self.code, self.container.text(text), f"{self.container.path}: {text}",
                                              self.threads))

    def _program(self, number: int, target: Any, plan: Plan, kernels: Sequence[LoadedKernel]) -> LoadedProgram:
        one = self.head.programs[number]
        context = self.found[0].context if self.found else Context(target.native, self.driver)
        return LoadedProgram(target, plan, kernels, one.signature, one.weights, self.weights, context,
                             str(self.container.path))

    def _compiled(self, number: int) -> LoadedProgram:
        """A program of its graph, compiled by this process, or by an earlier one of this user."""
        try:
            import llvmlite  # noqa: F401
        except ImportError:
            raise ArtifactError("the program cannot be compiled in this process", where=str(self.container.path),
                                why="llvmlite is not installed, and the file's machine code is not trusted",
                                do="pip install llvmlite; or, if the file comes from you, load it with "
                                   "trust_native=True (--trust-native on the command line)") from None
        # what compiles is not needed where machine code is trusted
        from anyshape.artifact import kept_code
        from anyshape.base.config import Config
        from anyshape.base.disk_cache import cache_of
        config, container, text = Config.make(), self.container, member("graph.txt", number)
        needed, cache = self.head.programs[number].needed, cache_of(config)
        key = "" if cache is None else kept_code.key_of(container.data(text), needed, config, self.threads)
        found = kept_code.kept(key, cache) if key and cache is not None else None
        if found is not None:
            return self._program(number, *_loaded(found[1], found[0], f"{container.path}: its plan, as it is kept",
                                                  self.threads))
        graph, sizes = parse_graph(container.text(text), needed, f"{container.path}: {text}")
        target, plan, kernels = _planned(graph, sizes, config, self.threads, f"{container.path}: {text}")
        program = self._program(number, target, plan, kernels)  # which asks for the routines that are kept
        if key:
            kept_code.keep(key, target, plan, kernels)
        return program


def _loaded(code: NativeCode, text: str, where: str, threads: int) -> tuple[Any, Plan, Sequence[LoadedKernel]]:
    """A plan of which there is machine code."""
    plan = parse_plan(text, where)
    names = dict.fromkeys(name for step in plan.steps for part in parts_of(step) if isinstance(part, KernelStep)
                          for one in part.regimes for name in one.kernels)
    target = deployment().trusted_target(code.machine, code, threads)
    return target, plan, code.kernels(names)


def _planned(graph: Graph, needed: tuple[Size, ...], config: Config, threads: int,
             where: str) -> tuple[Any, Plan, Sequence[LoadedKernel]]:
    """A graph of a file, compiled by this process."""
    from anyshape.base.disk_cache import cache_of
    from anyshape.compiler.driver import plan_graph
    with _compiling:
        target = deployment().compiling_target(cache_of(config), threads)
        try:
            planned = plan_graph(graph, target, config, needed=needed)
        except Exception as error:  # the border to a stranger's graph
            raise refused(where, f"it cannot be compiled: {str(error)[:200]}") from error
    verify(planned.plan)  # at each new set of sizes only what depends on them is checked
    kernels = [one for one in planned.kernels if isinstance(one, LoadedKernel)]
    return target, planned.plan, kernels


class LoadedModel:
    """A loaded program: a callable, used like the module that was saved. Calls may run at once in several threads.

    Arguments are arrays of numpy, PyTorch, JAX, or anything else with `__dlpack__`; results are of the kind of the
    first one.

    Raises (when called):
        InputError: an argument does not fit; nothing has run. IndexRangeError, DivisionError: the data are wrong.
    """

    def __init__(self, programs: Programs, options: tuple[bool, int, bool]) -> None:
        self.options = options  # of `load`, beside the path
        self.programs: Programs | None = programs
        self.container = programs.container
        self.path, self.made_with = self.container.path, programs.head.made_with
        first = programs[0]
        self.signature, self.plan, self.context = programs.head.programs[0].signature, first.plan, first.context
        self.inputs, self.names = first.inputs, first.names
        self.kinds, self.dtypes = first.kinds, first.dtypes
        self.flat_count = len(self.inputs) if self.signature.is_flat else -1  # of arguments that need no unpacking
        self.special = [(number, one.sizes) for number, one in enumerate(programs.head.programs) if number]

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        is_flat = not keywords and len(arguments) == self.flat_count
        flat = list(arguments) if is_flat else self.signature.flat(arguments, keywords)
        results = self._program(flat).run(flat)
        make = arrays.outgoing(flat)
        return self.signature.nested([make(one, dtype) if dtype else one
                                      for one, dtype in zip(results, self.dtypes, strict=True)])

    def run(self, flat: Sequence[Any]) -> list[Any]:
        """The program's outputs, as arrays of numpy (of bf16 the bits) and numbers, for one argument per input of the
        signature. Errors as of a call."""
        return self._program(flat).run(flat)

    def bytes_of(self, flat: Sequence[Any]) -> int:
        """Bytes of memory that such a call takes, results included; arguments and weights are not. Nothing runs.
        Errors as of a call's arguments."""
        return self._program(flat).bytes_of(flat)

    def _program(self, flat: Sequence[Any]) -> LoadedProgram:
        """The program for these arguments: the first that is for their sizes, or the file's first."""
        programs = self.programs
        if programs is None:
            raise InputError(f"{self.path} is closed", why="close() was called", do="load it again")
        for number, sizes in self.special:
            if all(_size(flat[place], dim) == size for place, dim, size in sizes):
                return programs[number]
        return programs[0]

    def describe(self) -> str:
        """What a call takes, a line an argument, with sizes by name and their ranges."""
        lines = []
        for _, one, kind in self.inputs:
            what = f"fixed to {one.value!r}" if one.kind == "fixed" else "a whole number" if isinstance(kind, str) \
                else renamed(str(kind), self.signature.names)
            lines.append(f"{one.name}: {what}")
        for name, low, high in self.plan.facts.ranges:
            shown = self.signature.names.get(name, name)
            lines.append(f"{low} <= {shown}" + ("" if high is None else f" <= {high}"))
        lines += [f"or {special_text(self.signature, sizes)}" for _, sizes in self.special]
        return printable("\n".join(lines))

    def seed(self, seed: int | None) -> None:
        """The random numbers of later calls follow from this seed, a whole number from 0; None: from the system's
        entropy, as they do at first.

        Raises:
            ConfigError: it is none. InputError: the program is closed.
        """
        if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or seed < 0):
            raise ConfigError(f"the seed is {seed!r:.80}", why="random numbers follow from a whole number from 0",
                              do="pass one, or None")
        if self.programs is None:
            raise InputError(f"{self.path} is closed", why="close() was called", do="load it again")
        self.programs.driver.random.seed(seed)

    def release(self) -> int:
        """Gives back the memory that idles; returns the bytes."""
        return self.context.release()

    def close(self) -> None:
        """Gives everything back; calls that run keep what they have. Later ones are refused."""
        programs, self.programs = self.programs, None
        if programs is not None:
            self.context.release()
            del programs
            gc.collect()  # generated code and what it learns of arguments know each other
            self.container.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """For processes that are spawned, and for copies: the file is loaded again."""
        if self.programs is None:
            raise InputError(f"{self.path} is closed", why="close() was called", do="load it again")
        return load, (self.path.absolute(), *self.options)

    def __enter__(self) -> LoadedModel:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def special_text(signature: Signature, sizes: Sequence[tuple[int, int, int]]) -> str:
    """Sizes of calls that have a program of their own, in words."""
    return ", ".join(f"dim {dim} of {signature.inputs[number].name} is {size}" for number, dim, size in sizes)


def _size(value: Any, dim: int) -> int:
    """A size of an argument; -1 where it has no such dim, which the first program refuses in words."""
    shape = value.shape if hasattr(value, "shape") else np.shape(value)
    return shape[dim] if isinstance(shape, tuple) and dim < len(shape) else -1
