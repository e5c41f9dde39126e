"""Dispatch code: a Python function generated per plan, the way into its program at the least cost that Python can have.

    inputs f32[b, n], f32[n], f32[8]  -->
        def enter(args, records, slow, fit):
            same = False
            try:
                (a0, a1, a2) = args
                same = alike(a2)
                if not same and (a2.shape != (8,)):
                    raise KeyError
                record = records[(a0.shape, a1.shape)]
            except (KeyError, ValueError, AttributeError, TypeError):
                record, (a0, a1, a2) = slow(args)
            undo = ()
            s = record.input_strides
            fits = True
            if not akin(a0, a1):
                fits = not (a0.dtype is not t0 or odd(a0) or a1.dtype is not t1 or odd(a1))
                if fits:
                    meet(a0, a1)
            if fits and not same:
                fits = not (a2.dtype is not t2 or odd(a2) or a2.stride() != s[2])
                if fits:
                    learn(a2)
            if not fits or a0.stride() != s[0] or a1.stride() != s[1]:
                (a0, a1, a2), undo = fit(record, (a0, a1, a2), fits)
            return record, (a0, a1, a2), (a0.data_ptr(), a1.data_ptr(), a2.data_ptr()), undo

Inputs of fixed sizes, parameters mostly, are looked at once; from then on `alike` asks torch in one call whether they
are what they were: type, dtype, sizes, strides, device, and what else a tensor can be
(runtime/driver/tensor_kinds.py); `akin` does the same for the others, sizes and strides aside. A backward program's
first argument is the tape; `values` are its entries and `origin` the forward's record. Inputs that are the same in
every call, as the weights of a file, stand there as one tuple: (a0, *b1).
"""
from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from anyshape.ir.types import TensorType
from anyshape.plan.ir.program import Plan
from anyshape.runtime.driver.interface import HostDriver

SHORT = 4  # values that are the same in every call, from which on a tuple of them has a name
PATIENCE = 8  # kinds of inputs (in inference mode or not, with gradients or without) that are learnt


def make_enter(plan: Plan, slots: Mapping[str, int], strided: frozenset[int], driver: HostDriver,
               bound: Mapping[int, Any] = MappingProxyType({})) -> Callable[..., Any]:
    """`enter` for a plan. `strided`: inputs whose strides bind symbols; `bound`: by position, those that are the same
    in every call, and that `args` do not have."""
    count = len(plan.inputs)
    restored = {position: index for index, position in enumerate(plan.restored)}
    called = [i for i in range(count) if i not in restored and i not in bound]
    fixed = [i for i in called if i not in strided and _is_fixed(plan.inputs[i])]
    placed = dict(plan.offsets)
    names: dict[str, Any] = {"alike": _never, "akin": _never, **driver.code.names}
    names["learn"] = _Learner(names, "alike", True, driver)
    names["meet"] = _Learner(names, "akin", False, driver)
    tests = _tests(plan, called, fixed, strided, names, driver)
    constants = {f"c{i}": array for i, array in bound.items()}
    addresses = {i: driver.address(array) for i, array in bound.items()}
    parameters = [plan.parameter_number(b) for b in sorted(plan.buffers, key=lambda b: slots[b.name])
                  if b.is_parameter and b.name not in placed]
    pointers = _with_runs([str(addresses[i]) if i in bound else driver.code.address(f"a{i}") for i in parameters],
                          {str(address): address for address in addresses.values()}, "p", names)
    every = _with_runs([f"c{i}" if i in bound else f"a{i}" for i in range(count)], constants, "b", names)
    into, taking = ("found", [f"a{i} = found[{i}]" for i in range(count) if i not in bound]) if bound else (every, [])
    taken = f"{_tuple(f'a{i}' for i in called) if called else '()'} = args"
    given = ", ".join(f"a{i}" for i in fixed)
    open_ = ", ".join(f"a{i}" for i in called if i not in fixed and isinstance(plan.inputs[i], TensorType))
    unlike = " or ".join(tests.shapes)
    tape = ", values, origin" if restored else ""
    lines = [
        f"def enter(args, records, slow, fit{tape}):",
        "    same = False",
        "    try:",
        f"        {taken}",
        *(f"        a{position} = values[{index}]" for position, index in restored.items()),
        *([f"        same = alike({given})", f"        if not same and ({unlike}):", "            raise KeyError"]
          if fixed else []),
        f"        record = records[{_tuple(tests.keys)}]",
        "    except (KeyError, ValueError, AttributeError, TypeError):",
        f"        record, {into} = slow(args{tape})",
        *(f"        {line}" for line in taking),
        "    undo = ()",
        "    s = record.input_strides",
        "    fits = True",
        *([f"    if not akin({open_}):", f"        fits = not ({' or '.join(tests.open)})", "        if fits:",
           f"            meet({open_})"] if open_ else []),
        *(["    if fits and not same:", f"        fits = not ({' or '.join(tests.fixed)})", "        if fits:",
           f"            learn({given})"] if fixed else []),
        f"    if {' or '.join(('not fits', *tests.strides))}:",
        f"        {into}, undo = fit(record, {every}, fits)",
        *(f"        {line}" for line in taking),
        f"    return record, {every}, {pointers}, undo",
    ]
    exec(compile("\n".join(lines), f"<entry of {plan.name}>", "exec"), names)
    key = [f"def key(args{tape}):", f"    {taken}",
           *([f"    same = alike({given})", f"    if not same and ({unlike}):", "        return None, False"]
             if fixed else ["    same = False"]),
           f"    return {_tuple(tests.keys)}, same"]
    exec(compile("\n".join(key), f"<key of {plan.name}>", "exec"), names)
    enter: Callable[..., Any] = names["enter"]
    # the key of a call (None where a fixed input has other sizes), and whether `alike` knows the fixed inputs
    enter.key = names["key"]  # type: ignore[attr-defined]
    return enter


class _Tests(NamedTuple):
    """What is asked of inputs, as text. keys: a call is found by; strides: of inputs that are not fixed; open, fixed:
    whether dtype and kind, and strides of the fixed ones, are others; shapes: whether a fixed one has other sizes."""

    keys: list[str]
    strides: list[str]
    open: list[str]
    fixed: list[str]
    shapes: list[str]


def _tests(plan: Plan, called: Sequence[int], fixed: Sequence[int], strided: frozenset[int],
           names: dict[str, Any], driver: HostDriver) -> _Tests:
    """The tests of the inputs that a call gives; the dtypes go to `names`."""
    found = _Tests([], [], [], [], [])
    for i in called:
        kind = plan.inputs[i]
        if not isinstance(kind, TensorType):
            found.keys.append(f"a{i}")
            continue
        dtype = names[f"t{i}"] = driver.dtypes[kind.dtype]
        names[f"d{i}"] = driver.device(kind.device)
        own = driver.code.strides(f"a{i}")
        kinds, strides = (found.fixed, found.fixed) if i in fixed else (found.open, found.strides)
        kinds.append(driver.code.unlike(f"a{i}", f"t{i}", dtype, f"d{i}"))
        strides.append(f"{own} != s[{i}]")
        if i in fixed:
            found.shapes.append(f"a{i}.shape != {kind.shape}")
            continue
        found.keys.append(f"a{i}.shape")
        if i in strided:
            found.keys.append(own)
    if plan.restored:
        found.keys.append("origin")
        # tensors of a tape that is not the forward's own come as they are
        found.strides.append("origin.__class__ is tuple")
    return found


def _is_fixed(kind: TensorType | str) -> bool:
    return isinstance(kind, TensorType) and all(isinstance(n, int) for n in (*kind.shape, *(kind.strides or ())))


def _never(*_tensors: Any) -> bool:
    return False


class _Learner:
    """Takes tensors that were looked at and fit as what the function `name` compares with from now on."""

    def __init__(self, names: dict[str, Any], name: str, sizes: bool, driver: HostDriver) -> None:
        self.names = names
        self.driver = driver
        self.name = name
        self.sizes = sizes
        self.learnt = 0

    def __call__(self, *tensors: Any) -> None:
        if self.learnt < PATIENCE:
            self.learnt += 1
            self.names[self.name] = self.driver.alike(tensors, self.sizes) or _never
            return
        self.names[self.name] = _never


def _tuple(parts: Any) -> str:
    return "(" + "".join(f"{part}, " for part in parts) + ")"


def _with_runs(parts: Sequence[str], values: Mapping[str, Any], letter: str, names: dict[str, Any]) -> str:
    """A tuple of parts. The names of those that are always the same `values` go to `names`; a run of them is one tuple,
    whose name begins with `letter`."""
    found: list[str] = []
    for is_known, run in itertools.groupby(parts, values.__contains__):
        texts = list(run)
        if is_known and len(texts) >= SHORT:
            name = f"{letter}{len(found)}"
            names[name] = tuple(values[text] for text in texts)
            texts = [f"*{name}"]
        elif is_known:
            names.update({text: values[text] for text in texts if text.isidentifier()})
        found += texts
    return _tuple(found)
