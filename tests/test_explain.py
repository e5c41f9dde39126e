"""explain, memory, stats, repro files, checked runs: what AnyShape says of itself is true and in the user's words."""
from __future__ import annotations

import io
import json
import warnings

import pytest
import torch
from rich.console import Console
from torch import nn

import anyshape
from anyshape.base.errors import AnyShapeError, ConfigError, InputError
from anyshape.frontend.capture.dynamo_backend import FallbackWarning
from anyshape.frontend.diagnostics import repro
from anyshape.frontend.messages.recompile_reasons import miss_words, source_words
from anyshape.frontend.messages.size_text import said
from anyshape.frontend.programs import compile_program as program
from anyshape.frontend.programs import differential_check
from anyshape.plan.ir.program import KernelStep
from anyshape.runtime.inspect.watermark import watched
from anyshape.sym.expr import symbol
from anyshape.tools import repro as repro_tool


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)

    def forward(self, ids, mask=None):
        y = torch.softmax(self.up(ids), -1)
        if mask is not None:
            y = y * mask
        return y


def test_before_the_first_call():
    fast = anyshape.compile(Net())
    assert "nothing is compiled yet" in str(fast.explain())
    assert fast.explain().to_dict()["programs"] == []
    assert "nothing is compiled yet" in str(fast.memory(ids_0=8))
    assert fast.memory().bytes is None


def test_programs_and_what_forced_them():
    fast = anyshape.compile(Net(), strict=True)
    x = torch.randn(5, 8)
    with torch.no_grad():
        fast(x)
        fast(x, torch.ones(5, 16))
        fast(x.unsqueeze(0).expand(2, 5, 8).contiguous())
    fast(x)
    told = [one.why for one in fast.explain().programs]
    assert told[0] == ""
    assert told[1] == "mask was None, now a tensor"
    assert told[2] == "ids had 2 dims, now 3"
    assert told[3].startswith("gradients were switched")
    text = str(fast.explain())
    for words in ("the first call", "mask was None, now a tensor", "ids_0 (dim 0 of ids)", "matmul"):
        assert words in text


def test_branches_on_sizes_are_named_with_their_line():
    def stepped(x):
        if x.shape[0] > 10:
            return x + 1
        return x - 1

    fast = anyshape.compile(stepped)
    fast(torch.randn(3))
    fast(torch.randn(30))
    why = fast.explain().programs[1].why
    assert "dim 0 of x is 30" in why and "<= 10" in why and "test_explain.py" in why and "if x.shape[0] > 10" in why


def test_small_sizes_are_named():
    def squeezed(x):
        return x.squeeze(0) + 1

    fast = anyshape.compile(squeezed)
    fast(torch.randn(3, 4))
    fast(torch.randn(1, 4))
    explanation = fast.explain()
    assert explanation.programs[1].why.startswith("dim 0 of x was 1: ")
    assert any(fallback.reason.startswith("dim 0 of x was 1") for fallback in explanation.fallbacks)


def test_kernels_calls_and_memory():
    net = Net()
    fast = anyshape.compile(net, strict=True)
    fast(torch.randn(5, 8)).sum().backward()
    forward, backward = fast.explain(ids=(32, 8)).programs
    assert forward.role == "forward" and backward.role == "backward"
    assert any("exp" in kernel.ops for kernel in forward.kernels)
    assert all(str(kernel.rows * kernel.columns) != "0" for kernel in forward.kernels)
    assert [call.target for call in forward.libraries] == ["matmul"]
    assert any(line.startswith("test_explain.py:") for kernel in forward.kernels for line in kernel.lines)
    stages = [name for name, _ in forward.seconds]
    assert "passes" in stages and "build" in stages and forward.passes


def test_memory_is_what_the_run_takes():
    fast = anyshape.compile(Net(), strict=True)
    with torch.no_grad():
        fast(torch.randn(5, 8))
    note = fast.memory(ids_0=32)
    executable = fast.programs[0].executable
    weights = list(fast.parameters())
    values = {"ids": torch.randn(32, 8)}
    arguments = []
    for kind in executable.plan.inputs:
        if isinstance(kind, str):
            arguments.append(32)
        else:
            shape = [size if isinstance(size, int) else 32 for size in kind.shape]
            found = [value for value in (*weights, *values.values()) if list(value.shape) == shape]
            arguments.append(found[0])
    record = executable.record(*arguments)
    outputs = 32 * 16 * 4
    assert note.bytes == record.arena + outputs
    assert fast.memory(ids=(32, 8)).bytes == note.bytes
    assert fast.memory().missing() == ("ids_0",) and "give ids_0" in str(fast.memory())


def test_memory_at_given_sizes_is_what_a_train_step_writes():
    net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 8))
    fast = anyshape.compile(net, strict=True)
    fast(torch.randn(5, 8)).square().mean().backward()
    forward, backward = fast.programs
    assert fast.memory().placed == (None, None)
    for rows in (1, 2, 17, 1000):
        with watched(forward.executable) as first, watched(backward.executable) as second:
            fast(torch.randn(rows, 8)).square().mean().backward()
        placed = fast.memory(input0_0=rows).placed
        assert placed == (first[0].counted, second[0].counted)
        assert placed == tuple(program.placed for program in fast.explain(input0_0=rows).programs)


class WideThenTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = {"up": (8, 512), "down": (512, 64), "first": (64, 192), "second": (64, 128), "one": (192, 8),
                 "other": (128, 8)}
        for name, (before, after) in sizes.items():
            setattr(self, name, nn.Linear(before, after, bias=False))

    def forward(self, x):
        narrow = self.down(self.up(x))
        return self.one(self.first(narrow)) + self.other(self.second(narrow))


def test_a_call_may_take_less_than_the_formula():
    fast = anyshape.compile(WideThenTwo().requires_grad_(False), strict=True)
    fast(torch.randn(5, 8))
    found = []
    for rows in (1, 16, 999):
        note, explanation = fast.memory(x_0=rows), fast.explain(x_0=rows)
        with watched(fast.programs[0].executable) as seen:
            fast(torch.randn(rows, 8))
        assert note.placed == (seen[0].counted,)
        formula = explanation.number(note.programs[0][1])
        less = seen[0].counted < formula
        assert ("at most" in str(note), "at most" in str(explanation)) == (less, less)
        assert note.bytes == seen[0].counted + rows * 8 * 4
        found.append(less)
    assert True in found, "the test has no case left"


def test_a_long_formula_is_said_in_numbers():
    rows, columns = symbol("rows"), symbol("columns")
    short, long = 4 * rows * columns, sum(((rows + at) // (at + 2) * columns for at in range(40)), 64 * rows)
    assert said(short) == "4*columns*rows B"
    assert said(short, (("rows", 2), ("columns", 512))) == "4*columns*rows B = 4.10 kB"
    told = said(long, (), (("rows", 1), ("columns", 1)))
    assert told.startswith("64 B at columns=1, rows=1 (by a formula of ") and len(told) < 100, told
    assert said(long, (("rows", 1), ("columns", 1))) == "64 B"
    assert said(long) == f"a formula of {len(str(long)):,} characters"


def test_a_size_that_does_not_exist():
    fast = anyshape.compile(Net())
    with torch.no_grad():
        fast(torch.randn(5, 8))
    with pytest.raises(InputError, match="no program has a size 'batch'"):
        fast.explain(batch=3)


def test_views():
    fast = anyshape.compile(Net())
    with torch.no_grad():
        fast(torch.randn(5, 8))
    explanation = fast.explain(ids_0=1000)
    found = json.loads(json.dumps(explanation.to_dict()))
    assert found["programs"][0]["outputs"] == {"formula": "64*ids_0", "value": 64000}
    console = Console(file=io.StringIO(), width=100)
    console.print(explanation)
    assert "64.0 kB" in console.file.getvalue() and "64.0 kB" in str(explanation)


def test_exported_programs_explain():
    exported = torch.export.export(Net(), (torch.randn(5, 8),), dynamic_shapes={
        "ids": {0: torch.export.Dim("batch", min=1, max=64)}})
    fast = anyshape.compile(exported)
    assert fast.explain(ids_0=4).programs[0].sizes == (("ids_0", "dim 0 of ids"),)
    assert fast.memory(ids_0=4).bytes > 0


@pytest.mark.parametrize(("part", "words"), [
    ("tensor 'L['x']' size mismatch at index 1. expected 64, actual 32", "dim 1 of x was 64, now 32"),
    ("tensor 'L['x']' stride mismatch at index 0. expected 4, actual 1", "stride 0 of x was 4, now 1"),
    ("tensor 'L['args'][0]' dtype mismatch. expected Float, actual Double", "input 0 was Float, now Double"),
    ("tensor 'L['x']' requires_grad mismatch. expected requires_grad=0",
     "x needed no gradient, now it needs a gradient"),
    ("tensor 'L['self']._modules['up']._parameters['weight']' size mismatch at index 0. expected 2, actual 5. Guard "
     "failed on a parameter, consider using torch._dynamo.config.force_parameter_static_shapes = False to allow it",
     "dim 0 of up.weight was 2, now 5"),
    ("tensor 'L['x']' dispatch key set mismatch. expected DispatchKeySet(CPU, BackendSelect, ADInplaceOrView), actual "
     "DispatchKeySet(CPU, BackendSelect)", "x was made outside of torch.inference_mode, now inside"),
    ("tensor 'L['x']' dispatch key set mismatch. expected DispatchKeySet(CPU, ADInplaceOrView), actual "
     "DispatchKeySet(CPU, ADInplaceOrView, AutogradCPU)", "torch.inference_mode was switched on or off"),
    ("expected type of 'L['x']' to be a tensor type, ' but found <class 'NoneType'>",
     "x was a tensor of another type, now a NoneType"),
    ("GLOBAL_STATE changed: autocast(cpu)_enabled ", "autocast changed"),
    ("L['flag'] == True   # if flag:  # a.py:3 in f", "flag was True, now 3"),
    ("L['self'].scale == 2.0  # y * self.scale  # a.py:9 in forward", "self.scale == 2.0 does not hold (a.py:9: "),
])
def test_words_of_guards(part, words):
    assert words in miss_words([part], {"flag": 3})


def test_words_of_sources():
    assert source_words("L['self']._modules['up']._parameters['weight']") == "up.weight"
    assert source_words("L['x'].size()[1]") == "dim 1 of x"
    assert source_words("L['args'][2]") == "input 2"


def test_stats_count_and_reset():
    anyshape.reset_stats()
    fast = anyshape.compile(lambda x: torch.relu(x) * 2)
    for rows in (3, 4, 4):
        fast(torch.randn(rows, 2))
    found = anyshape.stats(reset=True)
    assert found["programs"] == 1 and found["runs"] == 3 and found["plans"] == 2 and found["kernels"] == 1
    assert found["compile_seconds"] > 0 and found["graphs"] >= 1
    assert anyshape.stats()["runs"] == 0


def broken(monkeypatch):
    def fail(*arguments):
        raise KeyError("broken on purpose")

    monkeypatch.setattr(program, "compile_pair", fail)


def test_an_internal_error_leaves_a_file_to_run_again(monkeypatch, tmp_path, capsys):
    net = Net()
    x = torch.randn(5, 8)
    with monkeypatch.context() as patch, torch.no_grad():
        broken(patch)
        fast = anyshape.compile(net, dump=str(tmp_path))
        with pytest.warns(FallbackWarning, match="anyshape repro .*repro"):
            torch.testing.assert_close(fast(x), net(x))
    assert "KeyError" in fast.explain().fallbacks[0].reason
    [path] = tmp_path.glob("*.repro")
    found = repro.read(path.read_text())
    assert "broken on purpose" in found.error and found.stage == "frontend/programs/compile_program.py, _with_backward"
    assert set(found.sizes.values()) == {5} and found.versions["torch"] == torch.__version__
    assert any("broken on purpose" in line for line in found.traceback)
    verdict = repro_tool.run(found)
    assert verdict.problem == "" and verdict.compared == 1
    assert repro_tool.load(path).config == found.config


def test_strict_names_the_file(monkeypatch, tmp_path):
    broken(monkeypatch)
    fast = anyshape.compile(Net(), strict=True, dump=str(tmp_path))
    with torch.no_grad(), pytest.raises(AnyShapeError, match=r"report it with the file .*\.repro"):
        fast(torch.randn(5, 8))


def test_checked_runs_agree_and_differences_are_found(monkeypatch):
    net = Net()
    fast = anyshape.compile(net, check=2, strict=True)
    x = torch.randn(5, 8)
    y = x.clone()
    fast(y).square().sum().backward()
    found = net.up.weight.grad.clone()
    net.zero_grad()
    net(x).square().sum().backward()
    torch.testing.assert_close(found, net.up.weight.grad)

    relu = anyshape.compile(lambda x: torch.relu(x) * 2, check=2)
    relu(x)
    real = relu.programs[0].executable
    monkeypatch.setattr(relu.programs[0], "executable", lambda inputs: [out + 1 for out in real(inputs)])
    with pytest.warns(differential_check.DifferenceWarning, match="differs by up to 1"):
        torch.testing.assert_close(relu(x), torch.relu(x) * 2)
    assert relu.explain().fallbacks[-1].stage == "check"


def test_difference():
    one = torch.ones(3)
    assert differential_check.difference(one, one + 1e-6) == ""
    assert "differs by up to 1" in differential_check.difference(one, one + 1)
    assert "instead of" in differential_check.difference(one, one.double())
    assert differential_check.difference(torch.tensor([float("nan")]), torch.tensor([float("nan")])) == ""
    assert "differs" in differential_check.difference(torch.tensor([float("nan")]), torch.tensor([1.0]))
    assert differential_check.difference(torch.tensor([float("inf")]), torch.tensor([float("inf")])) == ""
    assert "1 of 2" in differential_check.difference(torch.tensor([1, 2]), torch.tensor([1, 3]))


def test_dials(tmp_path, capfd):
    fast = anyshape.compile(lambda x: torch.relu(x) * 2, show="capture,kernels", dump=str(tmp_path), check=1)
    fast(torch.randn(3, 2))
    shown = capfd.readouterr().err
    assert "# 0_inference: capture" in shown and "kernel k" in shown and "plan 0_inference" not in shown
    names = {path.name.partition("_")[2] for path in (tmp_path / "0_inference").iterdir()}
    assert {"capture.txt", "simplify.txt", "kernels.txt", "llvm.txt", "plan.txt"} <= names
    for setting in ({"show": "nothing"}, {"disable": "nothing"}):
        with pytest.raises(ConfigError, match="nothing"):
            anyshape.compile(lambda x: x, **setting)


@pytest.mark.parametrize("name", ["regimes", "output_reuse", "fast_dispatch"])
def test_a_technique_that_is_left_out_changes_the_program_and_no_number(name):
    def program(x, y):
        return torch.softmax(x, -1) @ torch.relu(y) + 1

    def facts(fast):
        plan = fast.programs[0].executable.plan
        return {"regimes": max(len(step.regimes) for step in plan.steps if isinstance(step, KernelStep)) > 1,
                "output_reuse": sum(buffer.is_temp for buffer in plan.buffers) < 3,
                "fast_dispatch": fast._anyshape.oblivious.dispatch is not None}[name]

    x, y = torch.randn(64, 96), torch.randn(96, 80)
    with torch.no_grad():
        whole, without = (anyshape.compile(program, strict=True, disable=left_out) for left_out in ("", f"cse, {name}"))
        for rows in (64, 20, 20):
            for fast in (whole, without):
                torch.testing.assert_close(fast(x[:rows], y), program(x[:rows], y), rtol=1e-5, atol=1e-5)
    assert (facts(whole), facts(without)) == (True, False)


def test_no_warning_without_a_reason():
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        anyshape.compile(Net())(torch.randn(2, 8))
