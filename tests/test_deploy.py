"""Deployment: a program is saved to one file, and runs from it without torch and without a compiler."""
from __future__ import annotations

import copy
import hashlib
import json
import os
import pickle
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import anyshape
from anyshape.artifact.format import container, safetensors
from anyshape.artifact.load import load
from anyshape.base import digests
from anyshape.base.errors import ArtifactError, ConfigError, InputError, Unsupported
from anyshape.ir.panels import from_panels
from anyshape.runtime.driver.numpy_driver import address_of, empty_strided, strides_of
from anyshape.tools.cli import main
from deploying import SHAPES, Encoder, alone, exported, ids, members_of, saved, with_members

KEPT = Path(__file__).parent / "deployed"
RUN = """
    import sys
    from pathlib import Path
    import numpy as np
    import anyshape
    run = anyshape.load(sys.argv[1], trust_native=sys.argv[3] == "native")
    if sys.argv[3] == "native":  # what a program with machine code of its own does without, imports included
        own = {name.removeprefix("anyshape.") for name in sys.modules if name.startswith("anyshape.")}
        printers = {"gemm", "gemv", "direct_conv", "recurrence", "softmax_rows", "winograd_conv", "routine", "amx"}
        unwanted = own & {*(f"backend.cpu.microkernels.{name}" for name in printers), "ir.parse", "ir.verify",
                          "kernel.loop_ir.parse", "backend.cpu.bytecode.encode_at_sizes", "runtime.numpy_ops.calls",
                          "kernel.loop_ir.program", "ops.table", "sym.prover", "base.config", "base.disk_cache",
                          "runtime.memory.offload_store", "plan.ir.show"}
        unwanted |= {name for name in own if name.startswith(("backend.cpu.llvm.", "compiler", "passes."))}
        unwanted |= sys.modules.keys() & {"zipfile", "difflib", "fractions", "tempfile", "queue", "_hashlib",
                                         "numpy.random"}
        assert not unwanted, unwanted
    with np.load(sys.argv[2]) as given:
        for i in range(len(given.files) // 2):
            y = run(given[f"x{i}"])
            assert type(y) is np.ndarray and y.flags.writeable
            np.testing.assert_allclose(y, given[f"y{i}"], rtol=1e-5, atol=1e-6)
    run.close()
    assert "torch" not in sys.modules
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    print("same", int(lines["VmHWM"].split()[0]) // 1024)
    """


@pytest.fixture(scope="module")
def model() -> Encoder:
    torch.manual_seed(0)
    return Encoder().eval()


@pytest.fixture(scope="module")
def file(model: Encoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("deployed"), model, ids(3, 7))


@pytest.fixture(scope="module")
def data(model: Encoder, file: Path) -> Path:
    """Inputs, and what eager PyTorch makes of them."""
    path = file.with_name("data.npz")
    with torch.no_grad():
        pairs = [(ids(*shape), model(ids(*shape))) for shape in SHAPES]
    np.savez(path, **{f"{name}{i}": value.numpy() for i, pair in enumerate(pairs)
                      for name, value in zip("xy", pair, strict=True)})
    return path


def test_digests_are_those_of_hashlib(monkeypatch: pytest.MonkeyPatch) -> None:
    for data in (b"", b"abc" * 1000, memoryview(b"0123456789")[3:]):
        expected = hashlib.sha256(data).hexdigest()
        assert digests.blake2b(data, digest_size=32).digest() == hashlib.blake2b(data, digest_size=32).digest()
        assert digests.sha256(data).hexdigest() == expected
        with monkeypatch.context() as without:
            without.delitem(sys.modules, "hashlib")
            assert digests.sha256(data).hexdigest() == expected


# --- other processes


def test_it_runs_where_there_is_only_numpy(file: Path, data: Path) -> None:
    word, megabytes = alone(RUN, file, data, "native").split()
    assert word == "same" and int(megabytes) < 120


def test_its_text_is_compiled_where_its_code_is_not_trusted(file: Path, data: Path) -> None:
    assert alone(RUN, file, data, "text", blocked=("torch",)).startswith("same")


def test_without_trust_and_without_a_compiler_it_says_so(file: Path) -> None:
    said = alone("""
        import sys, anyshape
        try:
            anyshape.load(sys.argv[1])
        except anyshape.AnyShapeError as error:
            print(error.what, error.where, error.why, error.do, sep="|")
        """, file)
    what, where, why, do = said.strip().split("|")
    assert "cannot be compiled" in what and where == str(file) and "llvmlite" in why and "trust_native=True" in do


def test_a_file_of_version_1_is_read(tmp_path: Path) -> None:
    """tests/deployed/v1.any was saved by version 0.1.0 of AnyShape, with what eager PyTorch computed beside it; it is
    never written again."""
    assert alone(RUN, KEPT / "v1.any", KEPT / "v1.npz", "text", blocked=("torch",)).startswith("same")


def test_what_was_compiled_of_a_file_before_is_loaded(
        model: Encoder, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYSHAPE_CACHE_DIR", str(tmp_path))
    x = ids(4, 9)
    with load(file) as run:
        wanted = run(x)
    kept = max(tmp_path.rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("it is compiled again")

    with monkeypatch.context() as patched:
        patched.setattr("anyshape.compiler.driver.plan_graph", refuse)
        with load(file) as run:
            torch.testing.assert_close(run(x), wanted, rtol=0, atol=0)
        members = members_of(file)  # another graph; a setting that looks at passes
        other = tmp_path / "other.any"
        with_members(other, {**members, "graph.txt": members["graph.txt"] + b"\n"})
        for path, check in ((other, "0"), (file, "2")):
            patched.setenv("ANYSHAPE_CHECK", check)
            with pytest.raises(ArtifactError, match="compiled again"):
                load(path)
        patched.delenv("ANYSHAPE_CHECK")
        data = kept.read_bytes()
        for damaged in (data[:-1], data[:9] + b"?" + data[10:], b""):
            kept.write_bytes(damaged)
            with pytest.raises(ArtifactError, match="compiled again"):
                load(file)
    with load(file) as run:  # and kept again
        torch.testing.assert_close(run(x), wanted, rtol=0, atol=0)
    assert kept.read_bytes() == data


# --- calls


def test_results_are_of_the_callers_kind(model: Encoder, file: Path) -> None:
    x = ids(4, 9)
    with load(file, trust_native=True) as run, torch.no_grad():
        wanted = model(x)
        by_torch, by_numpy = run(x), run(x.numpy())
        assert type(by_torch) is torch.Tensor and type(by_numpy) is np.ndarray
        torch.testing.assert_close(by_torch, wanted, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(torch.from_numpy(by_numpy), wanted, rtol=1e-5, atol=1e-6)
        # any strides, read-only memory
        torch.testing.assert_close(run(x.t().contiguous().t()), wanted, rtol=1e-5, atol=1e-6)
        frozen = x.numpy().copy()
        frozen.flags.writeable = False
        np.testing.assert_array_equal(run(frozen), by_numpy)


def test_bf16_of_other_libraries_comes_in_and_goes_out(tmp_path: Path) -> None:
    ml_dtypes, jax = pytest.importorskip("ml_dtypes"), pytest.importorskip("jax")
    program = torch.export.export(Halves(), (torch.randn(3, 4).bfloat16(), 2.0), dynamic_shapes={
        "x": {0: torch.export.Dim.DYNAMIC}, "scale": None})
    x = np.arange(8).reshape(2, 4).astype(ml_dtypes.bfloat16)
    with load(anyshape.save(anyshape.compile(program), tmp_path / "half.any"), trust_native=True) as run:
        wanted = run(torch.from_numpy(x.astype(np.float32)).bfloat16(), 2.0)["half"].float().numpy()
        for given in (x, x[:, ::-1][:, ::-1], jax.numpy.asarray(x)):
            found = run(given, 2.0)["half"]
            assert found.dtype == ml_dtypes.bfloat16 and isinstance(found, type(given))
            np.testing.assert_array_equal(np.asarray(found, np.float32), wanted)


def test_a_fork_of_a_process_that_has_computed_computes(file: Path) -> None:
    assert alone("""
        import os, sys, time
        import numpy as np, anyshape
        run = anyshape.load(sys.argv[1], trust_native=True, threads=2)
        x = np.ones((16, 100), np.int64)
        wanted = run(x)
        child = os.fork()
        if not child:
            os._exit(0 if (run(x) == wanted).all() else 3)
        until = time.monotonic() + 60
        while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < until:
            time.sleep(0.01)
        if not ended[0]:
            os.kill(child, 9)
        print(ended[0] == child and ended[1] == 0, (run(x) == wanted).all())
        """, file).split() == ["True", "True"]


def test_a_loaded_program_goes_to_other_processes(file: Path) -> None:
    x = ids(3, 5).numpy()
    with load(file, trust_native=True, threads=1) as run:
        wanted = run(x)
        stored = pickle.dumps(run)
        with copy.deepcopy(run) as other:
            np.testing.assert_array_equal(other(x), wanted)
        np.testing.assert_array_equal(run(x), wanted)
    with pickle.loads(stored) as again:
        np.testing.assert_array_equal(again(x), wanted)
    with pytest.raises(InputError, match="is closed"):
        pickle.dumps(run)


def test_what_does_not_fit_is_refused_and_the_next_call_runs(file: Path) -> None:
    with load(file, trust_native=True) as run:
        x = ids(3, 5).numpy()
        first = run(x)
        for wrong in ({"threads": -1}, {"threads": 2**40}, {"trust_native": "false"}, {"verify": 1}):
            ((name, value),) = wrong.items()
            assert refused(lambda wrong=wrong: load(file, **wrong)).what == f"{name} is {value!r}"
        for wrong, why in ((x.astype(np.float32), "dtype"), (x[0], "dims"), ("text", "array"), (x[:0], "ids_0")):
            with pytest.raises(InputError) as caught:
                run(wrong)
            assert why in str(caught.value) and caught.value.do
        with pytest.raises(InputError):
            run()
        with pytest.raises(InputError):
            run(x, x)
        with pytest.raises(anyshape.AnyShapeError, match="out of range"):
            run(np.full((2, 2), 50))
        np.testing.assert_array_equal(run(ids=x), first)


def test_calls_at_once_do_not_meet(file: Path, data: Path) -> None:
    wrong: list[BaseException] = []
    with np.load(data) as found:
        given = {name: found[name] for name in found.files}
    with load(file, trust_native=True, threads=1) as run:
        def work(first: int) -> None:
            try:
                for turn in range(30):
                    i = (first + turn) % len(SHAPES)
                    np.testing.assert_allclose(run(given[f"x{i}"]), given[f"y{i}"], rtol=1e-5, atol=1e-6)
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong, wrong[0]


@pytest.mark.parametrize("trust", (True, False))
def test_a_call_with_fewer_threads_than_torch_does_not_use_its_products(file: Path, data: Path, trust: bool) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with load(file, trust_native=trust, threads=1) as run, load(file, trust_native=trust, threads=2) as other, \
                np.load(data) as found:
            x, y = found["x0"], found["y0"]
            blas = [one.programs[0].program.runner.native.blas for one in (run, other)]
            assert not (blas[0].sgemm or blas[0].dgemm or blas[0].sgemm_batch or blas[0].dgemm_batch)
            assert blas[1].sgemm and blas[0].parallel == blas[1].parallel
            for one in (run, other):
                np.testing.assert_allclose(one(x), y, rtol=1e-5, atol=1e-6)
    finally:
        torch.set_num_threads(before)


def test_close_gives_all_back(file: Path) -> None:
    def mapped() -> bool:
        return str(file) in Path("/proc/self/maps").read_text()

    run = load(file, trust_native=True)
    run(ids(2, 3).numpy())
    assert mapped() and run.context.temporary.held
    run.close()
    run.close()
    assert not mapped() and not run.context.temporary.held
    with pytest.raises(InputError, match="closed"):
        run(ids(2, 3).numpy())
    opened = container.Container(file)
    read = opened.part("graph.txt")  # as a call does that runs meanwhile
    opened.close()
    assert mapped()
    del read
    assert not mapped()


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.any")
    with pytest.raises(ArtifactError, match="cannot be read"):
        load(tmp_path / "pipe.any")


class Nested(nn.Module):
    """Arguments and results that are nested; a scale that is fixed; halves and bools."""

    def forward(self, pair, mask=None, scale: float = 2.0):  # type: ignore[no-untyped-def]
        a, b = pair["a"], pair["b"][0]
        return {"sum": a + b * scale, "more": [a > b, (a.to(torch.bfloat16) * 2, a.shape[0])]}


def test_nesting_dtypes_and_numbers_come_back(tmp_path: Path) -> None:
    free = {0: torch.export.Dim.DYNAMIC}
    given = ({"a": torch.randn(3, 4), "b": [torch.randn(3, 4)]},)
    program = torch.export.export(Nested(), given, dynamic_shapes=({"a": free, "b": [free]},))
    path = anyshape.save(anyshape.compile(program), tmp_path / "nested.any")
    call = {"a": torch.randn(6, 4), "b": [torch.randn(6, 4)]}
    with load(path, trust_native=True) as run:
        found, wanted = run(call), Nested()(call)
    torch.testing.assert_close(found["sum"], wanted["sum"])
    assert torch.equal(found["more"][0], wanted["more"][0]) and found["more"][0].dtype is torch.bool
    assert torch.equal(found["more"][1][0], wanted["more"][1][0]) and found["more"][1][1] == 6


class Mathematics(nn.Module):
    """Functions of the C library: the rare ones, and those of large arguments."""

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        y = x.abs() + 1
        rare = (torch.acos, torch.asin, torch.atan, torch.sinh, torch.cosh, torch.asinh, torch.lgamma, torch.erfc)
        return [*(function(x / 100) for function in rare), torch.acosh(y), torch.atanh(x / 100), torch.tan(x),
                torch.sin(x * 1e6), torch.cos(x * 1e6), torch.atan2(x, y), torch.fmod(x, y), torch.hypot(x, y), y ** x,
                torch.nextafter(x, y)]


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_functions_of_the_c_library(dtype: torch.dtype, tmp_path: Path) -> None:
    path = saved(tmp_path, Mathematics(), torch.randn(5, dtype=dtype), dims=1)
    x = torch.linspace(-9, 9, 37, dtype=dtype)
    with load(path, trust_native=True) as run:
        for found, wanted in zip(run(x), Mathematics()(x), strict=True):
            torch.testing.assert_close(found, wanted)


class Products(nn.Module):
    """Products that numpy does where there is no BLAS: those of f64."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.double()
        return (y @ y.T).softmax(-1)


def test_products_without_a_library(tmp_path: Path) -> None:
    path = saved(tmp_path, Products(), torch.randn(5, 6), dims=1)
    x = torch.randn(4, 6) * 5
    np.savez(tmp_path / "data.npz", x=x.numpy(), y=Products()(x).numpy())
    assert alone("""
        import sys, numpy as np, anyshape
        run, given = anyshape.load(sys.argv[1], trust_native=True), np.load(sys.argv[2])
        np.testing.assert_allclose(run(given["x"]), given["y"], rtol=1e-12)
        print("same")
        """, path, tmp_path / "data.npz").strip() == "same"


# --- what cannot be saved


def refused(call: object) -> anyshape.AnyShapeError:
    with pytest.raises(anyshape.AnyShapeError) as caught:
        call()  # type: ignore[operator]
    assert caught.value.what and caught.value.why and caught.value.do
    return caught.value


class Airy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.special.airy_ai(x)


def test_what_needs_pytorch_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    path = tmp_path / "model.any"
    fast = anyshape.compile(exported(Airy(), torch.randn(3, 4)))
    error = refused(lambda: anyshape.save(fast, path))
    assert isinstance(error, Unsupported) and "airy_ai" in error.why and "test_deploy.py" in error.where
    trained = nn.Linear(3, 2)
    step = anyshape.train_step(trained, lambda m, x: m(x).sum(), torch.optim.SGD(trained.parameters(), 0.1))
    assert isinstance(refused(lambda: anyshape.save(step, path)), ConfigError)
    assert "each call is a tuple" in refused(lambda: anyshape.save(fast, path, tests=torch.zeros(2))).why
    assert "export" in refused(lambda: anyshape.save(anyshape.compile(nn.Linear(3, 2)), path)).do
    assert not list(tmp_path.iterdir())


# --- the file


def test_the_file_is_text_and_aligned_and_equal_for_equal_programs(model: Encoder, file: Path, tmp_path: Path) -> None:
    found = container.Container(file)
    assert all(begin % container.ALIGNMENT == 0 for begin, _ in found.places.values())
    for name, (_, array) in safetensors.decode(found.part("weights.safetensors"), "").items():
        assert not array.flags.writeable
        weight = model.state_dict()[name]
        if array.ndim == 4:  # in the panels that a product reads
            array = from_panels(array, *weight.shape[::-1]).T
        torch.testing.assert_close(torch.from_numpy(array.copy()), weight, rtol=0, atol=0)
    found.close()
    assert saved(tmp_path, model, ids(3, 7)).read_bytes() == file.read_bytes()


def test_others_read_the_weights(file: Path, model: Encoder, tmp_path: Path) -> None:
    reader = pytest.importorskip("safetensors.numpy")
    tensors = reader.load(members_of(file)["weights.safetensors"])
    assert tensors.keys() == model.state_dict().keys()
    own = safetensors.decode(memoryview(reader.save(tensors)), "")
    assert all(np.array_equal(own[name][1], tensor) for name, tensor in tensors.items())


def test_tied_weights_are_there_once(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.embed(x))

    tied = Tied().eval()
    path = saved(tmp_path, tied, ids(3, 4, words=20))
    with load(path, trust_native=True) as run, torch.no_grad():
        x = ids(2, 6, words=20)
        torch.testing.assert_close(run(x), tied(x))
    opened = container.Container(path)
    assert len(safetensors.decode(opened.part("weights.safetensors"), "")) == 1
    opened.close()


def test_versions_and_other_machines(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members = members_of(file)
    head = json.loads(members["format.json"])
    text = json.dumps({**head, "version": 5}).encode()
    later = with_members(tmp_path / "later.any", {**members, "format.json": text})
    with pytest.raises(ArtifactError, match="has version '5', this AnyShape reads versions 1 to 4"):
        load(later)
    monkeypatch.setattr("anyshape.backend.cpu.deployment._flags", lambda: frozenset(("sse", "sse2")))
    with pytest.raises(ArtifactError, match="which this processor has not"):
        load(file, trust_native=True)
    with load(file) as run:  # its text is for every machine
        run(ids(2, 3).numpy())
    monkeypatch.undo()
    monkeypatch.setattr("anyshape.backend.cpu.deployment.generator", lambda: "another")
    with pytest.raises(ArtifactError, match="another version"):
        load(file, trust_native=True)


def test_the_commands(file: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(file)]) == 0
    said = capsys.readouterr().out
    assert "ids: i64[ids_0, ids_1]" in said and "for this machine" in said
    with np.load(data) as given:
        np.save(tmp_path / "x.npy", given["x0"])
        wanted = given["y0"]
    command = ["run", str(file), "--input", f"ids={tmp_path / 'x.npy'}", "--trust-native"]
    assert main([*command, "--output", str(tmp_path / "y.npz")]) == 0
    with np.load(tmp_path / "y.npz") as found:
        np.testing.assert_allclose(found["result"], wanted, rtol=1e-5, atol=1e-6)
    assert main(["run", str(file), "--input", str(tmp_path / "nothing.npy")]) == 1
    assert "nothing.npy is no array" in capsys.readouterr().err


def test_the_command_run_says_what_is_wrong(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", ids(2, 5).numpy())
    np.savez("several.npz", ids=np.ones((2, 5), np.int64), more=np.ones(3))
    Path("empty.npy").touch()
    Path("cut.npz").write_bytes(Path("several.npz").read_bytes()[:100])
    Path("folder").mkdir()
    command = ["run", str(file), "--trust-native"]
    for words, wanted in (
            ("empty.npy", "empty.npy is no array"), ("cut.npz", "cut.npz is no array"),
            ("several.npz", "it holds several, by name: ids, more"),
            ("wrong=x.npy", "no argument wrong; ids is missing"),
            ("ids=x.npy --input ids=x.npy", "the argument ids is given twice"),
            ("x.npy --output folder", "folder cannot be written\n  why:   Is a directory"),
            ("x.npy --output none/y.npz", "none/y.npz cannot be written")):
        assert main([*command, "--input", *words.split(" ")]) == 1
        assert wanted in capsys.readouterr().err
    assert main([*command, "--input", "x.npy", "--output", "y"]) == 0  # the very file that was named
    assert {one.name for one in tmp_path.iterdir()} == {"cut.npz", "empty.npy", "folder", "several.npz", "x.npy", "y"}


def test_nothing_is_left_where_a_file_could_not_be_written(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.any"
    members = members_of(file)
    container.write(path, members)
    before = path.read_bytes()

    for error in (OSError, KeyboardInterrupt):
        def refuse(*_given: object, error: type[BaseException] = error) -> None:
            raise error

        with pytest.MonkeyPatch.context() as patched, pytest.raises(error):
            patched.setattr("zipfile._ZipWriteFile.write", refuse)
            container.write(path, members)
        assert [one.name for one in tmp_path.iterdir()] == ["model.any"] and path.read_bytes() == before


def test_ctrl_c_in_an_export_waits_for_its_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a trace: torch may drop it."""
    fast, given, came = anyshape.compile(lambda x: (x * 2).softmax(-1)), [signal.SIGINT], []
    fast(torch.randn(3, 4))
    usual = FakeTensorMode.dispatch

    def interrupted(*arguments: Any, **keywords: Any) -> Any:
        if given:
            signal.raise_signal(given.pop())
            came.append("deferred")
        return usual(*arguments, **keywords)

    monkeypatch.setattr(FakeTensorMode, "dispatch", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            anyshape.save(fast, tmp_path / "model.any")
    finally:
        signal.signal(signal.SIGINT, before)
    assert came and not list(tmp_path.iterdir())


class Halves(nn.Module):
    """Results of several dtypes, nested; a size."""

    def forward(self, x: torch.Tensor, scale: float = 2.0):  # type: ignore[no-untyped-def]
        y = torch.softmax(x * scale, -1)
        return {"y": y, "half": y.to(torch.bfloat16), "more": (y > 0.1, x.shape[0])}


def test_vectors_are_stored_and_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = torch.export.export(Halves(), (torch.randn(3, 4), 2.0), dynamic_shapes={
        "x": {0: torch.export.Dim.DYNAMIC}, "scale": None})
    path = tmp_path / "tested.any"
    tests = [(torch.randn(n, 4), 2.0) for n in (2, 7)]
    others = path.with_name("tested.any.untested")
    others.write_text("somebody's")
    compiled = anyshape.compile(program)
    anyshape.save(compiled, path, tests=tests)
    assert {one.name for one in tmp_path.iterdir()} == {path.name, others.name}
    others.unlink()
    for folder in (tmp_path, Path()):
        assert "directory" in refused(lambda folder=folder: anyshape.save(compiled, folder, tests=tests)).why
    for more in ((), ("--trust-native",)):
        assert main(["check", str(path), *more]) == 0
        assert "2 calls give the results that were saved" in capsys.readouterr().out
    assert main(["check", str(path), "--no-tests"]) == 0
    said = capsys.readouterr().out
    assert "version 2" in said and "2 calls with their results" in said and "that were saved" not in said
    members = members_of(path)
    tensors = safetensors.decode(memoryview(members["tests.safetensors"]), "")

    def changed(name: str, array: np.ndarray | None, message: str) -> None:  # type: ignore[type-arg]
        own = {key: value for key, value in tensors.items() if key != name}
        if array is not None:
            own[name] = (tensors[name][0] if name in tensors else "f32", array)
        with_members(path, {**members, "tests.safetensors": safetensors.encode(own)})
        assert main(["check", str(path), "--trust-native"]) == 1
        assert message in capsys.readouterr().err

    first = tensors["0.out.0"][1]
    changed("0.out.0", first * 1.01, "output 0: it differs by")
    changed("0.out.0", first[:1], "output 0: float32[2, 4]")
    changed("0.out.2", ~tensors["0.out.2"][1], "numbers are others")
    changed("0.in.0", None, "arguments are not those")
    changed("0.in.0", first[0], "arguments do not fit")
    changed("5.in.0", first, "calls are missing")
    changed("x", first, "no argument or result")
    with pytest.raises(InputError):
        anyshape.save(anyshape.compile(program), tmp_path / "wrong.any", tests=[(torch.randn(2, 5), 2.0)])
    assert [one.name for one in tmp_path.iterdir()] == ["tested.any"]


class Counting(nn.Module):
    """Writes into a buffer, or into its argument."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own = own
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        (self.seen if self.own else total).add_(x.sum(0))
        return x * 2


def test_what_cannot_be_written_to_is_not(tmp_path: Path) -> None:
    jax = pytest.importorskip("jax")
    """Weights are mapped read only: writing into them would end the process."""
    free = {0: torch.export.Dim.DYNAMIC}
    example = (torch.ones(3, 4), torch.zeros(4))
    own = torch.export.export(Counting(own=True), example, dynamic_shapes=(free, None))
    with pytest.raises(Unsupported, match="it writes into its parameters or buffers"):
        anyshape.save(anyshape.compile(own), tmp_path / "own.any")
    assert not list(tmp_path.iterdir())
    given = torch.export.export(Counting(own=False), example, dynamic_shapes=(free, None))
    path = anyshape.save(anyshape.compile(given), tmp_path / "given.any")
    total = np.zeros(4, np.float32)
    with load(path, trust_native=True) as run:
        run(np.ones((5, 4), np.float32), total)
        np.testing.assert_array_equal(total, 5)
        total.flags.writeable = False
        with pytest.raises(InputError, match="cannot be written to"):
            run(np.ones((5, 4), np.float32), total)
        for kept in (total.astype(">f4"), jax.numpy.asarray(total)):  # a copy is made of it; nobody may write to it
            with pytest.raises(InputError, match="cannot be written to"):
                run(np.ones((5, 4), np.float32), kept)
        apart = np.zeros(17, np.uint8)[1:].view(np.float32)  # not aligned
        run(np.ones((5, 4), np.float32), apart)
        np.testing.assert_array_equal(apart, 5)
    np.testing.assert_array_equal(total, 5)
    members = members_of(path)  # a file of a stranger, in which the argument is a weight
    head = json.loads(members["format.json"])
    position = head["signature"]["inputs"].pop()["position"]
    head["signature"]["args"][1].pop()
    name, array = "total", np.zeros(4, np.float32)
    stored = safetensors.decode(memoryview(members["weights.safetensors"]), "")
    members["weights.safetensors"] = safetensors.encode({**stored, name: ("f32", array)})
    head["weights"].append([position, name])
    with_members(path, {**members, "format.json": json.dumps(head).encode()})
    for trusted in (True, False):
        with pytest.raises(Unsupported, match="it writes into its parameters or buffers"):
            load(path, trust_native=trusted)


def test_importing_the_package_imports_neither() -> None:
    assert alone("""
        import sys, anyshape
        anyshape.load, anyshape.save, anyshape.compile
        print(*sorted(name for name in ("torch", "llvmlite", "numpy") if name in sys.modules))
        """).split() == []



class Subclass(np.ndarray[Any, Any]):
    """An array of another class."""


def test_addresses_and_memory_of_arrays() -> None:
    whole = np.zeros((6, 8), np.float32)
    arrays = [whole, whole[2:, 3:], whole[::-1], whole.T, np.zeros(()), np.zeros((0, 3)), whole.view(Subclass),
              np.frombuffer(b"0123456789", np.uint8)[3:], np.broadcast_to(np.float32(1), (3, 4))]
    for array in arrays:
        assert address_of(array) == array.ctypes.data
        assert strides_of(array) == tuple(step // array.itemsize for step in array.strides)
    assert strides_of(np.zeros(3, [("a", "u1"), ("b", "i4")])["b"]) == (-1,)  # 5 bytes are no whole number of elements
    for sizes, strides in (((2, 3), (3, 1)), ((2, 3), (1, 2)), ((2, 3), (8, 2)), ((), ()), ((4,), (1,)), ((4,), (0,)),
                           ((0, 3), (7, 7)), ((1, 3), (3, 1)), ((1, 3), (9, 1)), ((3, 1, 2), (2, 2, 1))):
        found = empty_strided(sizes, strides, np.dtype(np.float32))
        assert found.shape == sizes and (0 in sizes or strides_of(found) == strides)
        found[...] = 1
