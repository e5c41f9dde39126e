"""The report: its page's curves are the compiler's, under node and in a browser; files are whole or not there."""
from __future__ import annotations

import contextlib
import json
import re
import resource
import shutil
import signal
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import anyshape
from anyshape.base.errors import ConfigError, InputError, LimitError, OutputError
from anyshape.frontend.diagnostics import report
from anyshape.frontend.diagnostics.memory import pairs
from anyshape.frontend.diagnostics.report import contents, spans
from anyshape.frontend.diagnostics.report.page import FOLDER, page
from anyshape.frontend.diagnostics.report.picture import choice_text
from anyshape.plan.ir.program import MemoryStep
from anyshape.runtime.inspect.memory_timeline import scratch, timeline, used
from anyshape.runtime.specialize.saved_policy import SAVE_ALL
from anyshape.sym.expr import evaluate, floordiv, maximum, minimum, root, scaled, symbol
from anyshape.tools import cli
from limits import Layers

NO_LIMIT = contents.NO_LIMIT
NODE = shutil.which("node")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
OWN = """import torch
from torch import nn

def make():
    net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net
        def forward(self, x):
            return self.net(x).square().mean()
    def inputs(rows):
        return (torch.randn(rows, 16),)
    return Loss(), inputs, {"rows": (1, 300)}, "train"
"""


def compiled(limit: int):
    torch.manual_seed(0)
    fast = anyshape.compile(Layers(count=5), memory_limit=limit, strict=True)
    fast(torch.randn(4, 9, 32)).square().mean().backward()
    return fast


@pytest.fixture(scope="module")
def fast():
    return compiled(NO_LIMIT)


def data_of(fast, most=spans.POINTS, **sizes):
    return contents.collect("Layers", fast._anyshape.compilation, sizes, most)


@pytest.fixture(scope="module")
def data(fast):
    return data_of(fast, 9, x=(range(1, 17), range(1, 200), 32))


def limits(fast):
    return [limit for _, limit in pairs(fast._anyshape.compilation)]


def old_names(limit, fast, values):
    capture = fast._anyshape.compilation.captures[0]
    return {old: values[name] for old, _, name in capture.sizes if old in limit.program.layout.symbols}


def node(script: str, *arguments) -> object:
    """What a script returns that has the functions of curves.js as `Curves`."""
    text = f"const Curves = require({json.dumps(str(FOLDER / 'curves.js'))});\n" \
           "const given = JSON.parse(require('fs').readFileSync(0));\n" \
           f"console.log(JSON.stringify((() => {{{script}}})()));"
    done = subprocess.run([NODE, "-e", text], input=json.dumps(arguments), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no browser (chromium, google-chrome) is installed")


# ---- the data


def test_the_curve_is_the_one_that_the_limit_decides_by(fast) -> None:
    limit, = limits(fast)
    line = timeline(limit)
    for sizes in ((4, 9), (1, 1), (13, 257), (64, 64)):
        values = old_names(limit, fast, dict(zip(("x_0", "x_1"), sizes, strict=True)))
        around = scratch(limit, values)
        tradeoff = limit.tradeoff(values)
        choices = list(tradeoff)
        assert len(choices) > 3 or sizes[0] * sizes[1] < 100  # of few rows nothing is worth dropping
        for choice in choices:
            curve = line.curve(values, around, choice.dropped, used(limit.problem, choice.dropped))
            assert curve.tolist() == tradeoff.curve(choice.policy).tolist()
            assert curve.max() <= choice.live  # a layout takes no less than what is alive
        assert limit.needed(values, SAVE_ALL) >= tradeoff.curve(SAVE_ALL).max()


def test_the_data_name_sizes_as_people_do(data) -> None:
    program, = data["programs"]
    assert program["parts"] == ["0.forward", "0.backward"] and program["again"] and not program["limited"]
    assert [(one["name"], one["place"], one["least"], one["greatest"]) for one in program["symbols"]] == [
        ("x_0", "dim 0 of x", 1, 16), ("x_1", "dim 1 of x", 1, 199)]
    assert len(program["points"]) in (9, 10)
    texts = " ".join(one["text"] for one in program["formulas"])
    assert "x_0*x_1" in texts and "s" not in re.sub(r"scaled", "", texts)
    lines = {life["where"] for life in program["lives"]}
    assert any("torch.sin(torch.tanh(up(norm(x))))" in line for line in lines)
    dropped = [life for point in program["points"] for choice in point["choices"] for life, *_ in choice["drop"]]
    assert dropped and all(program["lives"][life]["gap"] for life in dropped)


def test_the_choice_under_a_limit_is_that_of_a_call(fast) -> None:
    limit, = limits(fast)
    values = old_names(limit, fast, {"x_0": 16, "x_1": 100})
    bytes_ = limit.needed(values, SAVE_ALL) * 7 // 10
    other = compiled(bytes_)
    program, = data_of(other, 4, x=(16, 100, 32))["programs"]
    point = program["points"][0]
    record = limits(other)[0].choose(old_names(limits(other)[0], other, {"x_0": 16, "x_1": 100}))
    choices = point["choices"][:point["chosen"] + 1]
    names = {program["lives"][life]["name"] for choice in choices for life, *_ in choice["drop"]}
    assert point["chosen"] > 0 and names == record.dropped
    assert max(point["curves"]["after"]) == point["choices"][point["chosen"]]["peak"] <= bytes_
    narrow = compiled(300_000)
    tight, = data_of(narrow, 1, x=(16, 100, 32))["programs"]
    assert "cannot run within 300 kB at x_0=16, x_1=100" in tight["points"][0]["chosen"]["what"]
    said, = narrow.memory(x=(16, 100, 32)).curves  # the same of both: the lowest choice
    assert tight["points"][0]["curves"]["after"] == list(said.chosen) != list(said.kept)
    assert tight["points"][0]["chosen"]["do"] == said.refused and tight["limited"] == said.limit
    if NODE is not None:
        assert node("return Curves.lowest(given[0])", tight["points"][0]) == said.choice.number


def test_a_report_leaves_what_calls_remember_alone(fast) -> None:
    own = next(program.executable.limit for program in fast.programs if "forward" in program.name)
    before = (len(own.known), len(own.needs))
    data_of(fast, 2)
    assert (len(own.known), len(own.needs)) == before


def test_inference_and_what_is_not_compiled() -> None:
    def some(x):
        y = torch.tanh(x @ x.T)
        return y[y > 0].sum() + y.exp().sum()

    fast = anyshape.compile(some)
    with pytest.raises(InputError, match="nothing to report"):
        data_of(fast)
    with torch.no_grad():
        fast(torch.randn(7, 5))
    found = data_of(fast, 3)
    assert found["notes"] or len(found["programs"]) > 1
    one = found["programs"][0]
    assert one["border"] == len(one["steps"]) and not one["again"] and one["points"][0]["choices"] == []


def test_without_a_limit_there_is_the_curve_alone() -> None:
    fast = anyshape.compile(Layers(2), strict=True)
    fast(torch.randn(3, 8, 32)).sum().backward()
    program, = data_of(fast, 2)["programs"]
    assert program["parts"] == ["0.forward", "0.backward"] and not program["again"]
    point = program["points"][0]
    assert point["curves"]["before"] == point["curves"]["after"] and max(point["curves"]["before"]) <= point["needed"]


def test_ranges_and_points() -> None:
    sizes, ranges = spans.taken_apart({"x_0": range(1, 9), "y": (4, range(1, 100))})
    assert sizes == {"x_0": 5, "y": (4, 50)} and ranges == {"x_0": (1, 8), "y_1": (1, 99)}
    for wrong in (range(3, 3), range(1, 9, 2), range(-1, 4)):
        with pytest.raises(InputError, match="goes over"):
            spans.taken_apart({"x_0": wrong})
    some = [spans.Span("a", "", 1, 100, 30), spans.Span("b", "", 1, 8, 8), spans.Span("c", "", 5, 5, 5)]
    found = spans.points(some, 16)
    assert found[0] == (30, 8, 5) and len(found) <= 17 and (1, 1, 5) in found and (100, 8, 5) in found
    assert all(one.least <= value <= one.greatest for point in found for one, value in zip(some, point, strict=True))
    many = [spans.Span(name, "", 1, 9, 3) for name in "abcdef"]
    assert 1 < len(spans.points(many, 25)) <= 25 and spans.points(many, 1) == ((3,) * 6,)


# ---- the page's arithmetic


@needs_node
def test_formulas_have_the_same_value_in_the_page() -> None:
    a, b = symbol("a"), symbol("b")
    formulas = [7, a, 3 * a * b * b - 5 * b + 2, floordiv(a + 63, 64) * 64, floordiv(-1 * a + 3, 7),
                a - 4 * floordiv(a, 4), maximum(a * 3, b * b), minimum(a + 1, 2 * b) + maximum(a, b), scaled(a, 0.6),
                floordiv(a * b, b + 3), root(a + b)]
    places = [{"a": a, "b": b} for a in (0, 1, 5, 64, 1000, 40961) for b in (1, 2, 77, 8192)]
    found = node("const [formulas, places] = given; return formulas.map((one) => places.map((at) => "
                 "Curves.evaluate(one, at)))", [contents.terms(one) for one in formulas], places)
    assert found == [[evaluate(one, at) for at in places] for one in formulas]


@needs_node
def test_the_page_computes_the_compilers_curves(fast, data) -> None:
    assert node("return given[0].programs.map(Curves.check)", data) == [
        {"compared": sum(len(point["choices"]) for point in data["programs"][0]["points"]), "wrong": 0}]
    program = data["programs"][0]
    limit, = limits(fast)
    line = timeline(limit)
    point = program["points"][0]
    for sizes in ({"x_0": 3, "x_1": 77}, {"x_0": 16, "x_1": 1}, point["values"]):  # computed at, or not
        values = old_names(limit, fast, sizes)
        choices = [-1, 2, len(point["choices"]) - 1]
        found = node("const [program, point, values, choices] = given; const bytes = Curves.sizes(program, values);"
                     "return choices.map((i) => Curves.curve(program, bytes, [0, 0], Curves.state(point, i)))",
                     program, point, sizes, choices)
        tradeoff = list(limit.tradeoff(old_names(limit, fast, point["values"])))
        for i, curve in zip(choices, found, strict=True):
            dropped = tradeoff[i].dropped if i >= 0 else frozenset()
            assert curve == line.curve(values, (0, 0), dropped, used(limit.problem, dropped)).tolist()
    script = "const [program, point] = given; const bytes = Curves.sizes(program, point.values);" \
             "return Curves.curve(program, bytes, point.scratch, Curves.state(point, -1))"
    assert node(script, program, point) == point["curves"]["before"]


@needs_node
def test_the_page_chooses_as_a_call_does(fast, data) -> None:
    program = data["programs"][0]
    limit, = limits(fast)
    for point in program["points"][::3]:
        values = old_names(limit, fast, point["values"])
        tradeoff = list(limit.tradeoff(values))
        asked = [point["needed"] * part // 40 for part in range(10, 42)]
        found = node("const [point, asked] = given; return asked.map((one) => Curves.choose(point, one))", point, asked)
        assert found[-1] == -1 and len(set(found)) > 1
        for bytes_, choice in zip(asked, found, strict=True):
            limit.bytes = bytes_
            wanted = None
            with contextlib.suppress(LimitError):
                policy = limit.choose(values)
                wanted = -1 if policy == SAVE_ALL else [one.dropped for one in tradeoff].index(policy.dropped)
            assert choice == wanted
        limit.bytes = NO_LIMIT


@needs_node
def test_who_is_alive_and_what_relieves(data) -> None:
    program = data["programs"][0]
    script = """const [program] = given, point = program.points[0], last = point.choices.length - 1;
      const bytes = Curves.sizes(program, point.values);
      const curves = [-1, last].map((i) => Curves.curve(program, bytes, point.scratch, Curves.state(point, i)));
      const sum = (what, i) => Curves.alive(program, bytes, what, i).reduce((sum, [, size]) => sum + size,
        point.scratch[i < program.border ? 0 : 1]);
      const sums = curves.map((curve, k) => curve.map((_, i) => sum(Curves.state(point, k ? last : -1), i)));
      return { curves, sums, gone: Curves.evictions(point, last) };"""
    found = node(script, program)
    assert found["curves"] == found["sums"]
    point = program["points"][0]
    assert [one["drop"] for one in found["gone"]] == [choice["drop"] for choice in point["choices"][1:]]
    assert all(one["freed"] > 0 and one["seconds"] > 0 for one in found["gone"])
    assert sum(one["freed"] for one in found["gone"]) == point["choices"][0]["live"] - point["choices"][-1]["live"]
    assert sum(one["seconds"] for one in found["gone"]) == pytest.approx(point["choices"][-1]["seconds"])


# ---- values that are moved out


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The model with a store, under half of what it needs at the sizes that a report begins with, and its data there.
    """
    torch.manual_seed(0)
    model, x = Layers(count=5), torch.randn(8, 160, 32)
    folder = str(tmp_path_factory.mktemp("store"))
    fast = anyshape.compile(model, memory_limit=NO_LIMIT, memory_store=folder, strict=True)
    fast(x).square().mean().backward()
    program = fast.programs[0].executable
    values = next(iter(program.specializations.values())).values
    program.limit.move(program.limit.needed(values, SAVE_ALL) // 2)
    return fast, data_of(fast, 1, x=(8, 160, 32))


def test_moves_are_in_the_data(stored) -> None:
    fast, data = stored
    program, = data["programs"]
    limit, = limits(fast)
    point = program["points"][0]
    values = old_names(limit, fast, point["values"])
    policy = limit.choose(values)
    choice = point["choices"][point["chosen"]]
    assert policy.moved and program["moves"] and choice["moved"] == len(policy.moved) and choice["away"] > 0
    assert point["curves"]["after"] == limit.tradeoff(values).curve(policy).tolist()
    assert max(point["curves"]["after"]) == choice["peak"] <= choice["needed"] <= program["limited"]
    assert choice["away"] == sum(limit.tradeoff(values).kept(move.saved) for move in policy.moved)
    assert "moved out" in choice_text(choice)


@needs_node
def test_the_page_knows_what_is_moved(stored) -> None:
    fast, data = stored
    program, = data["programs"]
    limit, = limits(fast)
    point = program["points"][0]
    assert node("return Curves.check(given[0])", program) == {"compared": len(point["choices"]), "wrong": 0}
    policy = limit.choose(old_names(limit, fast, point["values"]))
    script = """const [program, point, limit] = given, what = Curves.state(point, Curves.choose(point, limit));
      const bytes = Curves.sizes(program, point.values), curve = Curves.curve(program, bytes, point.scratch, what);
      const sums = curve.map((_, i) => Curves.alive(program, bytes, what, i).reduce((sum, [, size]) => sum + size,
        point.scratch[i < program.border ? 0 : 1]));
      return { moved: [...what.moved], dropped: [...what.dropped], curve, sums };"""
    found = node(script, program, point, program["limited"])
    assert found["curve"] == found["sums"] == point["curves"]["after"]
    lives = program["lives"]
    assert {lives[i]["name"]: (first - 1, last + 1 - program["border"]) for i, (first, last, *_) in found["moved"]} == {
        move.saved: (move.gone, move.back) for move in policy.moved}
    assert {lives[i]["name"] for i, _ in found["dropped"]} == policy.dropped
    for i, (_, _, copies, again) in found["moved"]:
        assert copies > 0 and (again is None) == (lives[i]["gap"] is None)


@needs_browser
def test_the_page_shows_what_is_moved(stored, tmp_path) -> None:
    path = tmp_path / "memory.html"
    path.write_text(page(stored[1]), encoding="utf-8")
    text, complaints = browse(path, "", "--dump-dom")
    found = Elements(text).found
    assert not complaints and found["check"]["data-wrong"] == "0"
    assert "copied to the store" in found["moved"]["text"] and "torch.tanh" in found["moved"]["text"]


# ---- the page


class Elements(HTMLParser):
    """The elements of a page that have an id, with their attributes and text, and every attribute that loads something.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: dict[str, dict[str, str]] = {}
        self.loads: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes) -> None:
        given = dict(attributes)
        self.loads += [f"{tag} {name}" for name, _ in attributes if name in ("src", "href", "action", "data")]
        self.open.append(given.get("id", ""))
        if given.get("id"):
            self.found[given["id"]] = {**given, "text": ""}
        if tag == "body":
            self.found["body"] = {**given, "text": ""}

    def handle_data(self, text) -> None:
        for name in self.open:
            if name:
                self.found[name]["text"] += text

    def handle_endtag(self, tag) -> None:
        if self.open:
            self.open.pop()


def test_a_page_needs_nothing_else_and_takes_any_text(data) -> None:
    text = page({**data, "name": "</script><b>@TITLE@ & co"})
    found = Elements(text)
    assert not found.loads and "import(" not in text and "fetch(" not in text
    assert re.findall(r"https?://[^\"' ]+", text) == ["http://www.w3.org/2000/svg"]
    assert "<title>Memory of &lt;/script&gt;&lt;b&gt;@TITLE@ &amp; co</title>" in text
    inside = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert json.loads(inside[1])["name"] == "</script><b>@TITLE@ & co"
    assert json.loads(inside[1])["programs"] == data["programs"]


def browse(path: Path, address: str, *more: str, width: int = 1200) -> tuple[str, str]:
    """The page as a browser has it after its scripts ran, and what it complained of."""
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
         "--enable-logging=stderr", f"--user-data-dir={path.parent / 'profile'}", f"--window-size={width},2400",
         "--virtual-time-budget=4000", *more, f"{path.as_uri()}{address}"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


@needs_browser
def test_the_page_in_a_browser(fast, data, tmp_path) -> None:
    path = tmp_path / "memory.html"
    path.write_text(page(data), encoding="utf-8")
    limit, = limits(fast)
    program = data["programs"][0]
    line = timeline(limit)
    for sizes, part in ((program["points"][0]["values"], 0.7), (program["points"][-1]["values"], 0.8),
                        ({"x_0": 5, "x_1": 123}, 10)):
        values = old_names(limit, fast, sizes)
        bytes_ = int(limit.needed(values, SAVE_ALL) * part)
        text, complaints = browse(path, f"#x_0={sizes['x_0']}&x_1={sizes['x_1']}&limit={bytes_}", "--dump-dom")
        found = Elements(text).found
        assert not complaints and not Elements(text).loads
        assert found["check"]["data-wrong"] == "0" and int(found["check"]["data-compared"]) > 30
        if part > 1:  # between computed sizes: the values' bytes are exact, scratch is that of the nearest
            assert "Between computed sizes" in found["status"]["text"] and found["body"]["data-choice"] == "-1"
            whole = line.curve(values, (0, 0))
            nearest = int(found["tile-before"]["value"]) - max(whole)
            assert any(nearest in point["scratch"] for point in program["points"])
            continue
        choice = int(found["body"]["data-choice"])
        limit.bytes = bytes_
        tradeoff = list(limit.tradeoff(values))
        assert choice > 0 and tradeoff[choice].dropped == limit.choose(values).dropped
        limit.bytes = NO_LIMIT
        around = scratch(limit, values)
        for name, dropped in (("tile-before", frozenset()), ("tile-after", tradeoff[choice].dropped)):
            assert int(found[name]["value"]) == line.curve(values, around, dropped, used(limit.problem, dropped)).max()
        assert "the fullest step" in found["alive"]["text"] and "torch.tanh" in found["evictions"]["text"]


@needs_browser
@pytest.mark.parametrize("width", (390, 1200))
def test_the_page_is_as_wide_as_its_window(data, tmp_path, width) -> None:
    path = tmp_path / "memory.html"
    path.write_text(page(data).replace("</body>", "<script>document.body.dataset.wide = document.documentElement."
                                       "scrollWidth - innerWidth;</script></body>"), encoding="utf-8")
    picture = tmp_path / "page.png"
    text, complaints = browse(path, "", "--dump-dom", width=width)
    assert not complaints and int(Elements(text).found["body"]["data-wide"]) <= 0
    browse(path, "", f"--screenshot={picture}", width=width)
    from matplotlib import image
    shown = image.imread(picture)
    assert shown.shape[0] > 1000 and len({tuple(pixel) for pixel in shown[200:1200:7, ::7, :3].reshape(-1, 3)}) > 20


# ---- files


def test_the_method_writes_all_three(fast, tmp_path) -> None:
    paths = [tmp_path / f"memory{suffix}" for suffix in report.SUFFIXES]
    fast.report(*paths, x_0=4, x_1=range(1, 50))
    assert paths[0].read_text("utf-8").startswith("<!doctype html>")
    assert paths[1].read_bytes().startswith(b"\x89PNG")
    found = json.loads(paths[2].read_text("utf-8"))
    assert found["format"] == contents.FORMAT and found["name"] == "Layers"
    assert found["programs"][0]["symbols"][1]["greatest"] == 49


def test_wrong_files_are_named_before_anything_is_computed(fast, tmp_path) -> None:
    with pytest.raises(ConfigError, match="has no file"):
        fast.report()
    with pytest.raises(ConfigError, match=r"not written to memory\.pdf"):
        fast.report(tmp_path / "memory.pdf")
    with pytest.raises(OutputError, match="there is no folder") as caught:
        fast.report(tmp_path / "none" / "memory.html")
    assert caught.value.do
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="there is no folder"):
        fast.report(tmp_path / "file" / "memory.html")
    with pytest.raises(InputError, match="no program has a size"):
        fast.report(tmp_path / "memory.html", y_0=4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_a_full_disk_leaves_what_was_there(fast, tmp_path) -> None:
    path = tmp_path / "memory.html"
    path.write_text("before")
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))  # the real thing: write() fails half way
        with pytest.raises(OutputError, match="could not be written") as caught:
            fast.report(path, x=(4, 9, 32))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert "as it was" in caught.value.why and caught.value.do
    assert [one.name for one in tmp_path.iterdir()] == ["memory.html"] and path.read_text() == "before"


def test_the_command(tmp_path, monkeypatch, capsys) -> None:
    torch._dynamo.reset()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_net.py").write_text(OWN)
    assert cli.main(["report", "own_net.py:make", "--out", "a.html", "b.json", "--points", "4"]) == 0
    program = json.loads(Path("b.json").read_text())["programs"][0]
    assert [(one["least"], one["greatest"]) for one in program["symbols"]] == [(1, 300)]
    assert program["again"] and len(program["parts"]) == 2 and len(program["points"]) in (4, 5)
    assert "Wrote a.html, b.json" in capsys.readouterr().out
    for words, told in ((["own_net.py:make", "--out", "none/a.html"], "there is no folder"),
                        (["no-such-model"], "no benchmark is called"),
                        (["own_net.py:make", "--size", "x"], "neither NAME=N"),
                        (["own_net.py:make", "--memory-limit", "much"], "a number of bytes"),
                        (["own_net.py:make", "--points", "0"], "at least one")):
        assert cli.main(["report", *words]) == 1
        error = capsys.readouterr().err
        assert told in error and "do:" in error


def test_results_count_from_where_their_memory_is_taken(fast) -> None:
    """Small ones are there from the first step on, whenever they are written."""
    limit, = limits(fast)
    plan = limit.backward.plan
    taken = {name: i for i, step in enumerate(plan.steps) if isinstance(step, MemoryStep) for name in step.take}
    gradients = {b.name for b in plan.buffers if b.is_output}
    line = timeline(limit)
    found = {life.name: life.first - line.border for life in line.lives if life.kind == "result"
             and life.first >= line.border}
    assert found == {name: taken.get(name, 0) for name in gradients} and list(found.values()).count(0) > 5
    values = old_names(limit, fast, {"x_0": 1, "x_1": 1})
    sizes = sum(evaluate(b.bytes, values) for b in plan.buffers if b.name in gradients - taken.keys())
    assert limit.needed(values, SAVE_ALL) > sizes
