"""The front end of torch.export: an ExportedProgram becomes one inference program."""
from __future__ import annotations

import copy
import io
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.export.graph_signature import InputKind, InputSpec, OutputKind
from torch.fx import GraphModule, Node

from anyshape import torch_compat as compat
from anyshape.base.config import Config
from anyshape.base.errors import InputError, Unsupported
from anyshape.frontend.aten import decompositions
from anyshape.frontend.capture.dynamo_backend import compile_or_interpret
from anyshape.frontend.capture.exported_sizes import guards, ranges_known
from anyshape.frontend.diagnostics.explain import explain
from anyshape.frontend.diagnostics.explain_text import Explanation
from anyshape.frontend.diagnostics.memory import memory
from anyshape.frontend.diagnostics.memory_text import MemoryNote
from anyshape.frontend.messages.recompile_reasons import name_sizes
from anyshape.frontend.programs.compile_program import compile_program
from anyshape.frontend.programs.eager_fallback import note, refuse, watchers
from anyshape.frontend.programs.session import Boxed, Compilation, ProgramRequest
from anyshape.frontend.symbols.exported_guards import value_at
from anyshape.frontend.train_step.defer_interrupts import DeferInterrupts
from anyshape.runtime.context.process_context import context_underway
from anyshape.torch_compat import tree as pytree
from anyshape.torch_compat.dynamo import internals
from anyshape.torch_compat.tracing.fx_threads import fx_in_this_thread
from anyshape.torch_compat.versions import api
from anyshape.torch_compat.versions.python_kernels import recurrent_decompositions

ADMITTED = 4096  # sets of sizes of which an exported program remembers that it takes them
STATE = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def compile_exported(exported: torch.export.ExportedProgram, config: Config, layouts: bool = True) -> ExportedCallable:
    """Compiles `exported` for inference; its parameters and buffers are shared, not copied. layouts: whether results
    are contiguous where PyTorch's are, at sizes of 0 and 1 too; those of files need not be.

    Raises:
        Unsupported: the program holds script objects, or torch does not decompose it.
    """
    with context_underway(config):
        return _compile(exported, Compilation(config, compile_program), layouts)


def _compile_saved(saved: bytes, config: Config) -> ExportedCallable:
    return compile_exported(torch.export.load(io.BytesIO(saved)), config)


def _compile(exported: torch.export.ExportedProgram, compilation: Compilation, layouts: bool) -> ExportedCallable:
    with compat.compile_lock(), fx_in_this_thread(), warnings.catch_warnings(), DeferInterrupts(once=True):
        # PyTorch copies a structure whose class it has deprecated itself
        warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
        try:
            decomposed = exported.run_decompositions({**decompositions.table(), **recurrent_decompositions()})
        except Exception as error:  # the border to torch's tracer, some of whose decompositions fail
            raise Unsupported("the exported program cannot be compiled: torch does not decompose it",
                              why=f"{type(error).__name__}: {' '.join(str(error).split())[:400]}",
                              do="write the operator that it names by others") from error
    signature = decomposed.graph_signature
    for spec in signature.input_specs:
        if spec.kind not in (*STATE, InputKind.USER_INPUT, InputKind.TOKEN):
            raise Unsupported(f"exported input {spec.arg.name} is a {spec.kind.name.lower()}",
                              why="only tensors and numbers are carried", do="compile the module with anyshape.compile")
    gm = decomposed.graph_module
    _make_tokens(gm, signature)
    kept = _write_mutations(gm, signature)
    state = [_state(decomposed, spec) for spec in signature.input_specs if spec.kind in STATE]
    compilation.tracing = ("the exported program", "", "export")
    values = [node for node in gm.graph.nodes if node.op == "placeholder"][len(state):]
    number = compilation.next_graph(name_sizes([(node.name, node.meta.get("val")) for node in values]))
    with ranges_known(decomposed, layouts) as known:
        program = compile_or_interpret(ProgramRequest(
            gm=gm, role="inference", name=f"{number}.inference", config=compilation.config, compilation=compilation,
            static_inputs=tuple(range(len(state)))))
    ranges = {symbol: known.get(symbol, (bounds.lower, bounds.upper))
              for symbol, bounds in decomposed.range_constraints.items()}
    return ExportedCallable(exported, gm, program, state, kept, ranges, guards(decomposed), compilation)


def _state(exported: torch.export.ExportedProgram, spec: InputSpec) -> torch.Tensor:
    if spec.kind == InputKind.CONSTANT_TENSOR or spec.persistent is False:
        return exported.constants[spec.target]
    return exported.state_dict[spec.target]


def _make_tokens(gm: GraphModule, signature: Any) -> None:
    """Turns inputs that order effects, such as a check of a matrix that was inverted, into nodes: callers pass none."""
    placeholders = {node.name: node for node in gm.graph.nodes if node.op == "placeholder"}
    for spec in signature.input_specs:
        if spec.kind == InputKind.TOKEN:
            token = placeholders[spec.arg.name]
            with gm.graph.inserting_before(gm.graph.find_nodes(op="placeholder")[-1].next):
                made = gm.graph.call_function(api.MAKE_TOKEN, ())
            made.meta = {"val": None}
            token.replace_all_uses_with(made)
            gm.graph.erase_node(token)


def _write_mutations(gm: GraphModule, signature: Any) -> int:
    """Turns outputs that mean "write this into that input" into `copy_` nodes; returns the number of user outputs."""
    placeholders = {node.name: node for node in gm.graph.nodes if node.op == "placeholder"}
    by_target = {spec.target: spec.arg.name for spec in signature.input_specs if spec.kind in STATE}
    output = gm.graph.output_node()
    returned: list[Any] = []
    for spec, value in zip(signature.output_specs, output.args[0], strict=True):
        if spec.kind == OutputKind.USER_OUTPUT:
            returned.append(value)
            continue
        if spec.kind == OutputKind.BUFFER_MUTATION:
            written = placeholders[by_target[spec.target]]
        elif spec.kind == OutputKind.USER_INPUT_MUTATION:
            written = placeholders[spec.target]
        elif spec.kind == OutputKind.TOKEN:
            continue
        else:
            raise Unsupported(f"exported output {spec.arg.name} is a {spec.kind.name.lower()}",
                              why="only user outputs and mutations are carried",
                              do="compile the module with anyshape.compile")
        with gm.graph.inserting_before(output):
            copy = gm.graph.call_function(torch.ops.aten.copy_.default, (written, value))
        copy.meta = {"val": written.meta["val"]}
    output.args = (tuple(returned),)
    gm.graph.lint()
    gm.recompile()
    return len(returned)


class ExportedCallable:
    """Calls a compiled exported program with the arguments of the original module. A deep copy, and what is pickled,
    are compiled anew.

    Raises (when called):
        InputError: wrong number or nesting of arguments, wrong dtype, rank, device or size. Nothing has run then.
    """

    def __init__(self, exported: torch.export.ExportedProgram, gm: GraphModule, program: Boxed,
                 state: list[torch.Tensor], outputs: int, ranges: dict[Any, tuple[Any, Any]],
                 guards: Sequence[Any], compilation: Compilation) -> None:
        self.exported = exported
        self.compilation = compilation
        self.in_spec = exported.call_spec.in_spec
        self.out_spec = exported.call_spec.out_spec
        self.program = program
        self.state = state
        self.outputs = outputs
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        self.inputs = [_UserInput(node) for node in placeholders[len(state):]]
        self.places = {symbol: place for symbol, place, _ in name_sizes(
            [(one.name, one.value) for one in self.inputs])}
        self.ranges = ranges
        self.guards = guards
        self.admitted: set[tuple[int, ...]] = set()  # sizes at which all of them hold

    def __deepcopy__(self, memo: dict[int, Any]) -> ExportedCallable:
        return compile_exported(copy.deepcopy(self.exported, memo), self.compilation.config)

    def __copy__(self) -> ExportedCallable:
        return compile_exported(self.exported, self.compilation.config)

    def __reduce__(self) -> Any:
        saved = io.BytesIO()
        torch.export.save(self.exported, saved)
        return _compile_saved, (saved.getvalue(), self.compilation.config)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        flat, found = pytree.tree_flatten((arguments, _in_order(keywords, self.in_spec)))
        if found != self.in_spec:
            raise InputError("the arguments do not have the nesting this program was exported with",
                             why=f"expected {self.in_spec}, got {found}",
                             do="pass the same number of arguments, lists and dicts as at export")
        self._check(flat)
        if internals.watched():  # whoever watches operators wants to see them
            reason, do = watchers()
            if reason:
                refuse(self.compilation.config, reason, do)
                note(self.compilation, reason, do)
            return self.exported.module()(*arguments, **keywords)
        outputs = self.program([*self.state, *flat])
        return pytree.tree_unflatten(outputs, self.out_spec)

    def _check(self, flat: list[Any]) -> None:
        sizes: dict[Any, int] = {}
        derived: list[tuple[str, Any, int]] = []
        for expected, value in zip(self.inputs, flat, strict=True):
            expected.check(value, sizes, derived, self.places)
        for symbol, size in sizes.items():
            low, high = self.ranges.get(symbol, (0, None))
            if size < low or (high is not None and size > high):
                place = self._words(symbol)
                most = "" if high is None or not high.is_Integer else f" <= {high}"
                raise InputError(f"{place} is {size}", why=f"the program is for {low} <= {place}{most}",
                                 do="export with a wider dynamic range, torch.export.Dim(name, min=1), and where that "
                                 "does not help with a tensor of this size: sizes of 0 and 1 may be another program")
        for where, formula, size in derived:
            wanted = formula.xreplace(sizes)
            if wanted.is_Integer and int(wanted) != size:
                raise InputError(f"{where} is {size}", do="pass inputs whose sizes agree",
                                 why=f"the program was exported with {self._words(formula)} = {wanted} there")

        given = tuple(sizes.values())
        if self.guards and given not in self.admitted:
            refused = next((guard for guard in self.guards if value_at(guard, sizes) in (False, None)), None)
            if refused is not None:
                raise InputError("the program does not take these sizes", do="pass such sizes, or export with these",
                                 why=f"it was exported for {self._words(refused)}")
            if len(self.admitted) < ADMITTED:
                self.admitted.add(given)

    def _words(self, formula: Any) -> str:
        """A formula of sizes with the names of inputs and their dims in place of torch's symbols."""
        return re.sub(r"\b[a-z]+\d+\b", lambda found: self.places.get(found.group(), found.group()), str(formula))

    def explain(self, **sizes: Any) -> Explanation:
        """What was decided, and why; `sizes` as for a compiled module."""
        return explain("exported program", self.compilation, sizes)

    def memory(self, **sizes: Any) -> MemoryNote:
        """What the program needs, as formulas; `.bytes` is the predicted peak at `sizes`."""
        return memory(self.compilation, sizes)

    def report(self, *paths: str | Path, **sizes: Any) -> None:
        """Writes a page, a picture or data of the program's memory; as for a compiled module."""
        from anyshape.frontend.diagnostics.report import report
        report([Path(path) for path in paths], "exported program", self.compilation, sizes)


class _UserInput:
    """What one user input must look like."""

    def __init__(self, node: Node) -> None:
        self.name = node.name
        self.value = node.meta.get("val")

    def check(self, found: Any, sizes: dict[Any, int], derived: list[tuple[str, Any, int]],
              places: dict[str, str]) -> None:
        expected = self.value
        if isinstance(expected, torch.Tensor):
            self._check_tensor(expected, found, sizes, derived, places)
        elif isinstance(expected, torch.SymInt):
            if not isinstance(found, int):
                raise InputError(f"input {self.name} is a {type(found).__name__}", why="the program takes an int there",
                                 do="pass an int")
            self._bind(f"input {self.name}", expected, found, sizes, derived, places)
        elif found != expected:
            raise InputError(f"input {self.name} is {found!r}", why=f"it was fixed to {expected!r} at export",
                             do="pass that value, or export again")

    def _check_tensor(self, expected: torch.Tensor, found: Any, sizes: dict[Any, int],
                      derived: list[tuple[str, Any, int]], places: dict[str, str]) -> None:
        where = f"input {self.name}"
        if not isinstance(found, torch.Tensor):
            raise InputError(f"{where} is a {type(found).__name__}", why="the program takes a tensor there",
                             do="pass a tensor")
        if found.dtype != expected.dtype:
            raise InputError(f"{where} has dtype {found.dtype}", why=f"the program was exported for {expected.dtype}",
                             do=f"convert it with .to({expected.dtype})")
        if found.dim() != expected.dim():
            raise InputError(f"{where} has {found.dim()} dimensions",
                             why=f"the program was exported for {expected.dim()}", do="reshape it")
        if found.device != expected.device:
            raise InputError(f"{where} is on {found.device}", why=f"the program was exported for {expected.device}",
                             do=f"move it with .to({str(expected.device)!r})")
        for dim, (wanted, size) in enumerate(zip(expected.shape, found.shape, strict=True)):
            self._bind(f"{where}, dimension {dim},", wanted, size, sizes, derived, places)

    @staticmethod
    def _bind(where: str, wanted: Any, size: int, sizes: dict[Any, int], derived: list[tuple[str, Any, int]],
              places: dict[str, str]) -> None:
        if not isinstance(wanted, torch.SymInt):
            if wanted != size:
                raise InputError(f"{where} is {size}", why=f"the program was exported with {wanted} fixed there",
                                 do="pass that size, or export with this dimension dynamic")
            return
        formula = wanted.node.expr
        if not formula.is_Symbol:
            derived.append((where, formula, size))
        elif sizes.setdefault(formula, size) != size:
            raise InputError(f"{where} is {size}", do="pass inputs whose sizes agree",
                             why=f"it is to be as {places.get(str(formula), formula)}, which is {sizes[formula]}")


def _in_order(keywords: dict[str, Any], in_spec: Any) -> dict[str, Any]:
    """Keyword arguments in the order of the export, as far as the names agree."""
    names = list(in_spec.child(1).context) if hasattr(in_spec, "child") else list(in_spec.children_specs[1].context)
    return {name: keywords[name] for name in names if name in keywords} | keywords
