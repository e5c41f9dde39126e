"""The command `anyshape`, as a person runs it."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from anyshape.tools import cli
from anyshape.tools.named_file import named_file

GRAPH = """graph twice(x: f32[n, 4]) where 1 <= n, n near 8
  a = mul(x, 2.0)  f32[n, 4]
  b = mul(x, 2.0)  f32[n, 4]
  c = add(a, b)    f32[n, 4]
  return c
"""
NET = """import torch
def make():
    return torch.nn.Linear(3, 2), [(torch.randn(4, 3),), (torch.randn(5, 3),)]
def wrong():
    return 5
net = torch.nn.Linear(3, 2)
"""


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "graph.txt").write_text(GRAPH)
    (tmp_path / "some_net.py").write_text(NET)


def test_help_needs_no_torch():
    code = "import sys\nfrom anyshape.tools import cli\ntry: cli.main(['--help'])\nexcept SystemExit: pass\n" \
           "cli.main(['bench', '--list'])\n" \
           "assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env={"PYTHONPATH": ":".join(sys.path)})
    assert done.returncode == 0, done.stderr
    assert all(command in done.stdout for command in cli.COMMANDS)


@pytest.mark.parametrize("command", ["demo", "bench", "explain", "repro", "opt", "cache", "version"])
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0 and f"anyshape {command}" in capsys.readouterr().out


def test_without_the_benchmarks_it_is_said_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "anyshape_bench", None)
    assert cli.main(["bench", "mlp"]) == 1
    told = capsys.readouterr().err
    assert "benchmarks are not installed" in told and all(part in told for part in ("where:", "why:", "do:"))
    assert "pip install 'anyshape[bench]'" in told
    with pytest.raises(SystemExit):
        cli.main(["explain", "--help"])  # the others do without


def test_explain(capsys):
    assert cli.main(["explain", "some_net:make", "--size", "input0_0=1024"]) == 0
    told = capsys.readouterr().out
    assert "1 program, from 1 captured graph" in told and "8.19 kB" in " ".join(told.split())
    assert cli.main(["explain", "some_net:make", "--train", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["role"] for one in found["programs"]] == ["forward", "backward"]


def test_explain_of_a_file(capsys):
    assert cli.main(["explain", "some_net.py:make"]) == 0
    assert "1 program" in capsys.readouterr().out


def test_explain_of_an_exported_program(tmp_path, capsys):
    exported = torch.export.export(torch.nn.Linear(3, 2), (torch.randn(4, 3),),
                                   dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
    torch.export.save(exported, tmp_path / "linear.pt2")
    assert cli.main(["explain", "linear.pt2"]) == 0
    assert "input_0 (dim 0 of input)" in capsys.readouterr().out


def test_opt(capsys):
    assert cli.main(["opt", "graph.txt"]) == 0
    assert capsys.readouterr().out.count("mul(x, 2.0)") == 1
    assert cli.main(["opt", "graph.txt", "--passes", "dce", "--every"]) == 0
    assert capsys.readouterr().out == "# dce: no change\n"
    assert cli.main(["opt", "graph.txt", "--to", "plan"]) == 0
    assert capsys.readouterr().out.startswith("plan twice")
    assert cli.main(["opt", "graph.txt", "--to", "kernels"]) == 0
    assert capsys.readouterr().out.startswith("kernel k")


def test_repro_of_a_plain_graph(capsys):
    assert cli.main(["repro", "graph.txt"]) == 0
    assert "1 results agree" in capsys.readouterr().out


def test_repro_reports_what_still_fails(monkeypatch, capsys):
    def fail(*arguments):
        raise KeyError("still broken")

    monkeypatch.setattr("anyshape.tools.repro.compile_graph", fail)
    assert cli.main(["repro", "graph.txt", "--traceback"]) == 1
    told = capsys.readouterr().out
    assert "compiling: KeyError: 'still broken'" in told and "Traceback" in told


@pytest.mark.parametrize(("arguments", "words"), [
    (["repro", "none.repro"], "cannot read none.repro"),
    (["repro", "some_net.py"], "some_net.py"),
    (["opt", "none.txt"], "cannot read none.txt"),
    (["opt", "graph.txt", "--passes", "constant_folding,melt"], "there is no pass melt"),
    (["explain", "nothing"], "neither a .pt2 file nor module:function"),
    (["explain", "none.pt2"], "there is no file none.pt2"),
    (["explain", "some_net:none"], "cannot load some_net:none"),
    (["explain", "some_net.py:none"], "cannot load some_net.py:none"),
    (["explain", "absent.py:make"], "cannot load absent.py:make"),
    (["explain", "some_net:net"], "is no function without arguments"),
    (["explain", "some_net:wrong"], "does not return (model, inputs)"),
    (["explain", "some_net:make", "--size", "x"], "is not NAME=N"),
    (["explain", "some_net:make", "--size", "rows=4"], "no program has a size 'rows'"),
])
def test_errors_say_what_to_do(arguments, words, capsys):
    assert cli.main(arguments) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: ") and words in told and "do:" in told and "Traceback" not in told


@pytest.mark.parametrize(("name", "value", "words"), [
    ("CHECK", "3", "setting check is 3"), ("THREADS", "-1", "setting threads is -1"),
    ("MAX_NODES", "0", "setting max_nodes is 0"), ("STRICT", "maybe", "it is a switch"),
    ("DUMP", "graph.txt", "dump cannot write"),
])
def test_wrong_settings_say_what_to_do(name, value, words, monkeypatch, capsys):
    monkeypatch.setenv(f"ANYSHAPE_{name}", value)
    assert cli.main(["explain", "some_net:make"]) == 1
    told = capsys.readouterr().err
    assert words in told and "do:" in told


def test_the_package_is_the_command():
    done = subprocess.run([sys.executable, "-m", "anyshape", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("anyshape ")


def test_cache(tmp_path, capsys):
    folder = tmp_path / "cache"
    (folder / "ab").mkdir(parents=True)
    (folder / "ab" / "cdef").write_bytes(b"x" * 2048)
    (folder / "notes.txt").write_text("mine")
    assert cli.main(["cache", "--dir", str(folder)]) == 0
    assert "1 entries" in capsys.readouterr().out
    assert cli.main(["cache", "clear", "--dir", str(folder)]) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["notes.txt"]


def test_version(capsys):
    assert cli.main(["version"]) == 0
    assert torch.__version__ in capsys.readouterr().out


def test_version_says_what_is_not_installed(capsys, monkeypatch):
    def version(name):
        raise cli.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(cli.metadata, "version", version)
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out.count("not installed") == 3


def test_a_file_that_is_no_model_is_named(tmp_path, capsys):
    pytest.importorskip("onnx")
    (tmp_path / "notes.onnx").write_bytes(b"no model")
    assert cli.main(["compile", str(tmp_path / "notes.onnx"), "-o", str(tmp_path / "m.any")]) == 1
    assert "notes.onnx" in capsys.readouterr().err


BROKEN = {
    "syntax.py": ("def g(:\n", "SyntaxError"),
    "raises.py": ("def g():\n    return [][1]\n", "IndexError"),
    "at_load.py": ("limit = 1 / 0\n", "ZeroDivisionError"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_error_of_the_user_s_own_lines_is_told_with_its_line(name, tmp_path, capsys):
    text, kind = BROKEN[name]
    (tmp_path / name).write_text(text)
    assert cli.main(["explain", f"{name}:g"]) == 1
    told = capsys.readouterr().err
    assert kind in told and f"{name}:" in told and all(part in told for part in ("where:", "why:", "do:"))


@pytest.mark.parametrize("command", ["opt", "repro"])
def test_a_file_that_is_no_text_is_refused(command, tmp_path, capsys):
    (tmp_path / "noise").write_bytes(b"\x9d\xff" * 50)
    assert cli.main([command, "noise"]) == 1
    assert "no text in UTF-8" in capsys.readouterr().err


def test_a_cache_that_is_a_file_is_refused(capsys):
    assert cli.main(["cache", "--dir", "graph.txt"]) == 1
    assert "not a folder" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "code", "words"), [
    (KeyboardInterrupt(), 130, "interrupted"), (OSError(28, "No space left on device"), 1, "No space left")])
def test_ctrl_c_and_a_full_disk_end_a_command_without_a_traceback(error, code, words, monkeypatch, capsys):
    def ended(parsed):
        raise error

    monkeypatch.setattr(cli, "_cache", ended)
    assert cli.main(["cache"]) == code
    told = capsys.readouterr().err
    assert words in told and "Traceback" not in told


def test_names_that_the_terminal_cannot_show_are_escaped(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "anyshape", "cache", "--dir", str(tmp_path / "ü")],
                          capture_output=True, text=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and "\\xfc" in done.stdout, done.stderr


def test_a_file_that_is_there_decides_which_sign_ends_its_name(tmp_path: Path) -> None:
    for name in ("a=b.npy", "plain.npy", "x"):
        Path(name).touch()
    assert named_file("plain.npy") == ("", "plain.npy")
    assert named_file("a=b.npy") == ("", "a=b.npy") and named_file(str(tmp_path / "a=b.npy"))[0] == ""
    assert named_file("ids=a=b.npy") == ("ids", "a=b.npy")
    assert named_file("serving:0=x=plain.npy") == ("serving:0=x", "plain.npy")
    assert named_file("ids=no=where.npy") == ("ids", "no=where.npy") and named_file("no.npy") == ("", "no.npy")
    assert named_file("ids=") == ("ids", "") and named_file("") == ("", "")
