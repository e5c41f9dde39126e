"""Edited stages: a person dumps, changes a text, and compiles again with it; what does not fit is refused by line."""
from __future__ import annotations

import random
import re
import warnings
from pathlib import Path

import pytest
import torch
from llvmlite import binding

import anyshape
from anyshape.backend.cpu.codegen.kernel import emit
from anyshape.backend.cpu.machine.target import HARDWARE, host
from anyshape.base.config import Config
from anyshape.base.errors import AnyShapeError, ConfigError, EditError, ParseError, VerifyError
from anyshape.compiler.driver import compile_graph
from anyshape.compiler.stages import stages_of
from anyshape.frontend.programs import differential_check
from anyshape.ir.parse import parse as parse_graph
from anyshape.kernel.loop_ir.kernel_override import differences, put_back
from anyshape.kernel.loop_ir.parse import parse
from anyshape.kernel.loop_ir.show import show
from anyshape.kernel.schedule.multiversion import versions
from anyshape.sym.expr import symbols_of
from text_cases import CASES


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def attend(x, w):
    return torch.softmax(x / 2.0, -1) @ w


def look_up(table, index, mask):
    return torch.where(mask, table[index].double().sum(-1), 0.0)


def x_and_w():
    return torch.randn(3, 5), torch.randn(5, 4)


def add_up(x):
    y = torch.tanh(x)
    return y, y.sum(0)


ARGUMENTS = {add_up: lambda: (torch.randn(40, 130),), attend: x_and_w,
             look_up: lambda: (torch.randn(7, 5), torch.tensor([0, 6, 2]), torch.rand(3) > 0.5)}


@pytest.fixture(scope="module")
def dumped(tmp_path_factory):
    """Function -> what dump= wrote for it."""
    folders = {}
    for function, arguments in ARGUMENTS.items():
        torch._dynamo.reset()
        folders[function] = tmp_path_factory.mktemp(function.__name__)
        anyshape.compile(function, dump=str(folders[function]), strict=True)(*arguments())
    return folders


def stage(folder, name, graph="0_inference"):
    """The file of a stage; the number before its name is that of its pass."""
    [path] = (Path(folder) / graph).glob(f"*_{name}.txt")
    return path


def changed(dumped, tmp_path, function, name, *pairs):
    """A copy of the dumped stages of `function` with texts of one stage replaced."""
    folder = tmp_path / "0_inference"
    folder.mkdir()
    for path in (dumped[function] / "0_inference").iterdir():
        (folder / path.name).write_text(path.read_text())
    text = stage(tmp_path, name).read_text()
    for old, new in pairs:
        assert old in text, text
        text = text.replace(old, new, 1)
    stage(tmp_path, name).write_text(text)
    return str(tmp_path)


# ---- put back


def test_stages_that_nobody_touched_are_computed(dumped):
    fast = anyshape.compile(attend, edit=str(dumped[attend]), strict=True)
    for rows in (1, 3, 40):
        x, w = torch.randn(rows, 9), torch.randn(9, 2)
        torch.testing.assert_close(fast(x, w), attend(x, w))
    assert fast.explain().programs[0].edited == ()


@pytest.mark.parametrize(("name", "pairs"), [
    ("capture", [("2.0)", "4.0)")]),
    ("simplify", [("0.5)", "0.25)")]),
    ("dce", [("div = mul(arg2_1, 0.5)", "div = div(arg2_1, 4.0)")]),
    ("kernels", [("f32 = 0.5", "f32 = 0.25")]),
])
def test_an_edited_stage_stands_in_place_of_the_computed_one(dumped, tmp_path, name, pairs):
    folder = changed(dumped, tmp_path, attend, name, *pairs)
    fast = anyshape.compile(attend, edit=folder, strict=True)
    for rows in (3, 1, 0, 40):
        x, w = torch.randn(rows, 9), torch.randn(9, 2)
        torch.testing.assert_close(fast(x, w), torch.softmax(x / 4.0, -1) @ w)
    [path] = fast.explain().programs[0].edited
    assert path == str(stage(folder, name)) and f"edited: {path}"[:60] in str(fast.explain())
    assert len(fast.programs) == 1


def test_an_edit_that_computes_the_same_passes_the_check(dumped, tmp_path):
    # the exponentials again, in place of the row buffer; columns before rows that they do not need
    folder = changed(dumped, tmp_path, attend, "kernels", (
        "      r9: f32 = load t0[i1]\n      r10: f32 = div r9, r8\n      store p1[i0*n1 + i1] r10",
        "      r20: f32 = load p0[i0*n1 + i1]\n      r21: f32 = mul r20, r1\n      r22: f32 = sub r21, r3\n"
        "      r23: f32 = exp r22\n      r24: f32 = div r23, r8\n      store p1[i0*n1 + i1] r24"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = anyshape.compile(attend, edit=folder, strict=True, check=2)
        x, w = torch.randn(6, 130), torch.randn(130, 3)
        torch.testing.assert_close(fast(x, w), attend(x, w))
    assert "r23: f32 = exp r22" in "".join(map(show, fast.programs[0].compiled.programs.values()))


def test_an_edit_that_computes_something_else_is_found_by_the_check(dumped, tmp_path):
    folder = changed(dumped, tmp_path, attend, "dce", ("0.5)", "0.25)"))
    x, w = x_and_w()
    fast = anyshape.compile(attend, edit=folder, check=2)
    with pytest.warns(differential_check.DifferenceWarning, match="gives other results than the reference"):
        torch.testing.assert_close(fast(x, w), attend(x, w))
    with pytest.raises(VerifyError, match="gives other results"):
        anyshape.compile(attend, edit=folder, check=2, strict=True)(x, w)


def lifted(text, bytes_=64):
    """A plan whose arena begins that much later."""
    text = re.sub(r"(?m)  arena (\S.*)$", rf"  arena \1 + {bytes_}", text, count=1)
    return re.sub(r"(?m)arena @ (.*)$", rf"arena @ \1 + {bytes_}", text)


@pytest.mark.parametrize("name", ["allocate", "plan"])
def test_an_edited_plan_stands_in_place_of_the_computed_one(dumped, tmp_path, name):
    """Its buffers lie elsewhere, the steps are one by one, and the results are the same."""
    text = stage(dumped[add_up], name).read_text()
    folder = changed(dumped, tmp_path, add_up, name, (text, lifted(text).replace("  together  0-1\n", "")))
    fast = anyshape.compile(add_up, edit=folder, strict=True, check=1)
    for shape in ((40, 130), (1, 7), (0, 3), (300, 2)):
        x = torch.randn(shape)
        torch.testing.assert_close(fast(x), add_up(x))
    [program] = fast.programs
    assert program.executable.plan.together == () and dict(program.executable.plan.offsets) == {"sum parts": 64}
    assert len(fast.explain().programs[0].kernels) == 2


def test_steps_stand_in_another_order(tmp_path):
    """Two kernels that need nothing of each other change places, in the order that later passes go on from."""
    def two(x, y):
        return x.sum(1), torch.sort(y)[0]

    def compiled(**settings):
        torch._dynamo.reset()
        return anyshape.compile(two, strict=True, **settings)

    x, y = torch.randn(4, 9), torch.randn(12)
    compiled(dump=str(tmp_path))(x, y)
    path = stage(tmp_path, "reorder")
    lines = path.read_text().split("\n")
    (first, a), (second, b) = [(k, line) for k, line in enumerate(lines) if line.startswith(("  0 ", "  1 "))]
    own = [line.strip() for line in lines[first + 1:second]]  # attributes below the first one
    tail = next(k for k in range(second + 1, len(lines)) if not lines[k].startswith("      "))
    moved = [b.replace("  1 ", "  0 ", 1), *lines[second + 1:tail], a.replace("  0 ", "  1 ", 1), *own]
    text = "\n".join([*lines[:first], *moved, *lines[tail:]])
    text = re.sub(r"steps ([01])-(\d)  (output|extern)", lambda m: f"steps 0-2  {m[3]}", text)
    path.write_text(text)
    fast = compiled(edit=str(tmp_path))
    for found, wanted in zip(fast(x, y), two(x, y), strict=True):
        torch.testing.assert_close(found, wanted)
    assert fast.explain().programs[0].edited == (str(path),)


def test_forward_and_backward_are_edited_apart(tmp_path):
    def run(**settings):
        torch._dynamo.reset()
        fast = anyshape.compile(lambda x: torch.tanh(x) * 3.0, strict=True, **settings)
        x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
        y = fast(x)
        y.sum().backward()
        return fast, y.detach(), x.grad

    _, y, grad = run(dump=str(tmp_path))
    path = stage(tmp_path, "dce", "0_backward")
    path.write_text(path.read_text().replace("3.0)", "6.0)"))
    fast, again, doubled = run(edit=str(tmp_path))
    assert torch.equal(again, y)
    torch.testing.assert_close(doubled, 2 * grad)
    forward, backward = fast.explain().programs
    assert forward.edited == () and backward.edited == (str(path),)


class Mixed(torch.nn.Module):
    """Gathers, slices, joins, masks, reductions, several dtypes, a library product, an extern op."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(11, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.up = torch.nn.Linear(8, 12)

    def forward(self, tokens, scale):
        x = self.norm(self.table(tokens))
        y = torch.cat([x[:, 1:], x[:, :1] * 2], 1)
        y = torch.where(tokens[..., None] > 3, y.cumsum(1), x.to(torch.bfloat16).float())
        z = torch.nn.functional.pad(torch.tanh(self.up(y)), (2, 1))
        return (z * scale).amax(-1).sum() + z.std(), torch.isnan(z).any(0), (tokens << 1) % 5 + tokens.shape[1]


def test_every_stage_of_a_train_step_reads_back(tmp_path):
    def run(**settings):
        torch._dynamo.reset()
        torch.manual_seed(0)
        fast = anyshape.compile(Mixed(), strict=True, **settings)
        for shape in ((3, 5), (2, 9)):
            loss, *rest = fast(torch.randint(0, 11, shape), torch.tensor(1.5))
            loss.backward()
        return fast, [loss.detach(), *rest, *(p.grad for p in fast.parameters())]

    _, wanted = run(dump=str(tmp_path))
    for path in tmp_path.rglob("*.txt"):
        if path.stem.partition("_")[2] != "llvm":
            path.write_text(path.read_text() + "\n# looked at\n")
    fast, found = run(edit=str(tmp_path), check=2)
    every = len(stages_of(Config())) - 1  # all but LLVM's text
    assert [len(program.edited) for program in fast.explain().programs] == [every, every]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_an_edited_stage_is_dumped_elsewhere_as_computed(dumped, tmp_path):
    folder = changed(dumped, tmp_path, attend, "dce", ("0.5)", "0.25)"))
    second = tmp_path / "second"
    anyshape.compile(attend, edit=folder, dump=str(second), strict=True)(*x_and_w())
    assert "0.25" in stage(second, "kernels").read_text()
    fast = anyshape.compile(attend, edit=str(second), strict=True)
    x, w = x_and_w()
    torch.testing.assert_close(fast(x, w), attend(x, w))  # nobody has touched the second folder


# ---- refused

HERE = -1  # the line is that of the edit


def refused(function, folder, **settings):
    """What is said; also without strict, for nobody edits a stage to have it ignored."""
    with pytest.raises(EditError) as caught:
        anyshape.compile(function, edit=folder, **settings)(*ARGUMENTS[function]())
    error = caught.value
    assert error.what and error.where and error.why and error.do
    return error


@pytest.mark.parametrize(("function", "name", "old", "new", "line", "why"), [
    (attend, "dce", "sub(div, amax)", "sub(div, amax", HERE, "expected"),
    (attend, "dce", "sub(div, amax)", "subtract(div, amax)", HERE, "there is no op subtract"),
    (attend, "dce", "sub(div, amax)", "sub(div, nowhere)", HERE, "nowhere"),
    (attend, "dce", "sub(div, amax)    ", "add(matmul, amax)", HERE, "matmul is neither a value defined above"),
    (attend, "dce", "keep)  f32[s77, 1]", "keep)  f32[s77, s15]", HERE, "amax gives f32[s77, 1]"),
    (attend, "dce", "arg2_1: f32", "arg2_1: f64", HERE, "f64"),
    (attend, "dce", "arg4_1: f32[s15, s21])", "arg4_1: f32[s15, s21], more: f32[s15])", HERE, "the inputs are"),
    (attend, "dce", "0 <= s77", "2 <= s77", HERE, "what is known of sizes"),
    (attend, "dce", "near 3", "near 3, 4 divides s77", HERE, "what is known of sizes"),
    (attend, "dce", "return matmul", "return div_1", HERE, "the results have the types f32[s77, s21]"),
    (attend, "dce", "return matmul", "return matmul, matmul", HERE, "the results have the types"),
    (attend, "dce", "return matmul", "return matmul strides [1, s77]", HERE, "have the strides dense"),
    (attend, "dce", "return matmul", "write arg2_1 <- sub\n  return matmul", HERE, "that are written"),
    (attend, "dce", "return matmul", "return nothing", HERE, "the edited text has nothing"),
    (attend, "dce", "div = mul(arg2_1, 0.5) ", "div = mul(arg2_1, s99)", HERE, "s99 is neither a value"),
    (attend, "capture", "graph 0_inference", "graph other", HERE, "the name"),
    (attend, "dce", "graph 0_inference", "kernel 0_inference", HERE, "graph"),
    (attend, "kernels", "f32 = exp r6", "f32 = exp r60", HERE, "r60 is not known here"),
    (attend, "kernels", "f32 = sub r5, r3", "f32 = sub r5, r0", HERE, "it ended with its stage"),
    (attend, "kernels", "reduce maximum r2", "reduce median r2", HERE, "does not stand here"),
    (attend, "kernels", "f32 = exp r6", "f32 = expo r6", HERE, "there is no operation expo"),
    (attend, "kernels", "f32 = exp r6", "f64 = exp r6", HERE, "an operand of exp is f64, not f32"),
    (attend, "kernels", "store p1[", "store p0[", HERE, "p0 is only read"),
    (attend, "kernels", "store p1[", "store p2[", HERE, "there is no buffer p2"),
    (attend, "kernels", "load p0[i0*n1 + i1]", "load p0[i0*n1 + i1 + 1]", 2, "the computed kernel does not"),
    (attend, "kernels", "load p0[i0*n1 + i1]", "load p0[i0*n1 + n9]", HERE, "n9 stands for nothing here"),
    (attend, "kernels", "store p1[i0*n1 + i1]", "store p1[i0*n1]", 2, "is not in the computed kernel"),
    (attend, "kernels", "      store p1[i0*n1 + i1] r10", "", 2, "of the computed kernel is missing"),
    (attend, "kernels", "t0: f32[max(1, n1)]", "t0: f32[1]", 2, "row buffers"),
    (attend, "kernels", "rows (i0: n0)", "rows (i0: 2*n0)", 2, "the rows of k"),
    (attend, "kernels", "columns (i1: n1)", "columns (i1: 2*n1)", 11, "the same loops"),
    (attend, "kernels", "p0: in f32", "p0: inout f32", 2, "the parameters of k"),
    (attend, "kernels", "kernel k", "kernel other", HERE, "there is no kernel other"),
    (attend, "kernels", "r1: f32 = 0.5", "0.5", HERE, "this is no instruction"),
    (attend, "kernels", "vector i1", "vector i0", HERE, "not the last"),
    (add_up, "kernels", "split_reduction (i2: min(", "split_reduction (i2: max(", 2,
     "the directives of k"),
    (add_up, "kernels", "fold p2[i2*n1 + i1]", "fold p2[i1]", 2, "is not in the computed kernel"),
    (add_up, "kernels", " with add", "", HERE, "fold with nothing"),
    (add_up, "kernels", "  split_reduction", "# split_reduction", 9, "fold does not stand here"),
    (attend, "llvm", "define", "declare", 0, "made for people and LLVM"),
    (attend, "plan", "  arena", "  the arena", HERE, "expected 'arena'"),
    (attend, "plan", "  arena 64*", "  arena 128*", 0, "the arena is"),
    (attend, "plan", "arena @ 0", "arena @ 4", 0, "is not aligned"),
    (attend, "plan", "arena @ 0", "arena", 0, "div_1 has no offset"),
    (attend, "plan", "steps 0-1  arena", "steps 1-1  arena", 0, "step 0 touches div_1, which is there from step 1"),
    (attend, "plan", "output 0", "output 1", HERE, "matmul is another than"),
    (attend, "plan", "4*s21*s77 bytes", "4*s21*s77 + 4 bytes", HERE, "matmul is another than"),
    (attend, "plan", "4*s15*s77 bytes  steps 0-1", "2*s15*s77 bytes  steps 0-1", 11, "is proved to lie inside"),
    (attend, "plan", "arg2_1, &div_1;", "arg2_1, &div_1 + s77;", HERE, "is proved to lie inside"),
    (attend, "plan", "arg2_1, &div_1;", "arg2_1, &arg2_1;", HERE, "the computed plan does not write arg2_1"),
    (attend, "plan", "; s77, s15)", "; s77, 2*s15)", HERE, "no step of the computed plan calls that"),
    (attend, "plan", "matmul(div_1", "matmul_add(div_1", HERE, "no step of the computed plan calls that"),
    (attend, "plan", "out     matmul", "out     div_1", HERE, "lives elsewhere"),
    (attend, "plan", "s15 near 5", "s15 near 5, 4 divides s15", 2, "what is known of sizes"),
    (attend, "plan", "  1  matmul", "  1 ?matmul", HERE, "optional steps"),
    (attend, "reorder", "  1  matmul", "  2  matmul", HERE, "step 2 stands where step 1 should"),
    (add_up, "plan", "together  0-1", "together  0-2", 0, "there are no steps 0-2"),
])
def test_a_wrong_edit_is_refused_with_its_line(dumped, tmp_path, function, name, old, new, line, why):
    error = refused(function, changed(dumped, tmp_path, function, name, (old, new)))
    assert why in error.why
    assert str(stage(tmp_path, name)) in error.where
    if line == HERE:
        before = stage(dumped[function], name).read_text()
        line = 1 + before[:before.index(old)].count("\n")
    assert not line or f"line {line}: " in error.where


def test_an_edit_cannot_read_elsewhere_through_an_index(dumped, tmp_path):
    """The place in a gather is a register: its way, not its name, must be the computed one."""
    text = stage(dumped[look_up], "kernels").read_text()
    gathers = re.findall(r"r\d+: f32 = load p\d+\[.*%(\d+).*\]", text)
    assert gathers, text
    (name, program), *_ = [(p.name, p) for _, p in parse(text) if f"%{gathers[0]}" in show(p)]
    # another numbering is the same kernel
    numbered = re.sub(r"(?<![\w])(r|%)(\d+)\b", lambda m: f"{m[1]}{int(m[2]) + 100}", show(program))
    assert numbered != show(program) and differences(program, parse(numbered)[0][1]) == []
    # the index itself, not made safe
    loads = re.findall(r"r(\d+): i64 = load", show(program))
    other = show(program).replace(f"%{gathers[0]}", f"%{loads[0]}")
    assert other == show(program) or any("loads p" in why for why in differences(program, parse(other)[0][1]))
    # no check any more
    lines = [line for line in show(program).split("\n") if " check " not in line]
    if len(lines) != len(show(program).split("\n")):
        assert any("is missing" in why for why in differences(program, parse("\n".join(lines))[0][1]))
    assert put_back({name: program}, show(program)) == {name: program}


def test_files_that_are_no_stage_are_refused(dumped, tmp_path):
    folder = Path(changed(dumped, tmp_path, attend, "dce"))
    other = folder / "0_inference" / "06_other.txt"
    other.write_text("graph other()\n  return\n")
    assert "0_inference has the stages 00_capture.txt, 01_constant_folding.txt" in refused(attend, str(folder)).why
    other.unlink()
    stage(folder, "dce").write_bytes(b"\xff\xfe")
    assert "cannot be read" in refused(attend, str(folder)).what
    stage(folder, "dce").write_text("")
    assert "graph" in refused(attend, str(folder)).why


def test_a_stage_that_is_left_out_cannot_be_edited(dumped, tmp_path):
    folder = changed(dumped, tmp_path, attend, "dce", ("0.5)", "0.25)"))
    assert "_prepacked_gemm.txt, 40_kernels.txt" in refused(attend, folder, disable="dce").why


def test_folders_are_looked_at_before_anything_compiles(tmp_path):
    with pytest.raises(ConfigError, match="edit names no folder"):
        anyshape.compile(attend, edit=str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="the same folder"):
        anyshape.compile(attend, edit=str(tmp_path), dump=str(tmp_path / "." ))


# ---- the text of kernels


def kernels_of(name):
    try:
        return list(compile_graph(parse_graph(CASES[name]), Config.make(strict=True)).programs.values())
    except AnyShapeError:
        return []


def test_kernels_read_back(dumped):
    programs = [program for name in CASES for program in kernels_of(name)]
    programs += [program for folder in dumped.values()
                 for _, program in parse(stage(folder, "kernels").read_text())]
    assert len(programs) >= 10
    every = [one for program in programs for version in versions(program, HARDWARE) for one in version.programs]
    assert any(one.columns and symbols_of(one.columns[0][1]) & dict(one.rows).keys() for one in every)
    for program in dict.fromkeys((*programs, *every)):
        [(line, again)] = parse(show(program))
        assert line == 1 and show(again) == show(program)
        assert differences(program, again) == []
        assert uncommented(emit(again, host())) == uncommented(emit(program, host()))


def uncommented(text):
    return [line for line in text.split("\n") if not line.lstrip().startswith(";")]


WORDS = ("f64", "i64", "bool", "store", "exp", "mul", "reduce", "where", "check", "row", "columns", "0", "1.5", "inf",
         "cast", "index", "max(1, n1)", "%1", "")


def garbled(text, draw):
    """The text with one slip: a word changed into another one of it or of WORDS, or a line moved, lost or doubled."""
    if draw.random() < 0.3:
        lines = text.split("\n")
        line = lines.pop(draw.randrange(1, len(lines)))
        for _ in range(draw.randrange(3)):
            lines.insert(draw.randrange(1, len(lines) + 1), line)
        return "\n".join(lines)
    parts = re.split(r"(\w+)", text)
    words = range(1, len(parts), 2)
    first = text[:text.index("kernel")].count("\n") and len(re.findall(r"\w+", text[:text.index("kernel")]))
    place = words[draw.randrange(first, len(words))]
    parts[place] = draw.choice((draw.choice(WORDS), parts[draw.choice(words)], parts[draw.choice(words)]))
    return "".join(parts)


@pytest.mark.parametrize("seed", range(8))
def test_a_garbled_kernel_is_refused_or_touches_nothing_else(dumped, seed):
    """Whatever a slip of the hand makes of a text: an error with its line, or a kernel that fits and LLVM takes."""
    draw = random.Random(seed)
    function = draw.choice([attend, look_up])
    text = stage(dumped[function], "kernels").read_text()
    computed = {program.name: program for _, program in parse(text)}
    taken = 0
    for _ in range(250):
        try:
            found = put_back(computed, garbled(text, draw))
        except (ParseError, VerifyError) as error:
            assert re.match(r"line \d+: ", error.where) and error.why and error.do
            continue
        for name, program in found.items():
            if show(program) != show(computed[name]):
                taken += 1
                binding.parse_assembly(emit(program, host())).verify()
    assert taken
