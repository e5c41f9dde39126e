"""Hostile files: whatever is in a file, reading it ends soon, in a program or in an error of four parts, and nothing in
it has run. Small by default; `pytest -m full` changes 100,000 files."""
from __future__ import annotations

import json
import random
import re
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from anyshape.artifact.check import check
from anyshape.artifact.format.elf import LoadedObjects, check_object
from anyshape.artifact.format.text_limits import parse_graph, parse_kernels, parse_plan
from anyshape.artifact.judged import is_inside
from anyshape.artifact.load import load
from anyshape.artifact.native_code import native_code
from anyshape.base.errors import ArtifactError, InputError
from anyshape.ir.types import TensorType
from anyshape.sym.expr import symbol
from deploying import changed_bytes, members_of, mutants, saved, with_members

SOON = 1.0  # seconds of processor time


class Small(nn.Module):
    """A product, a softmax, a gather."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.linear = nn.Embedding(9, 4), nn.Linear(4, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.linear(self.embed(x)), -1)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return saved(tmp_path_factory.mktemp("hostile"), Small(), torch.randint(0, 9, (3, 4)), tested=True)


def refused(read: Callable[[], object]) -> ArtifactError:
    """The error of what is refused, soon."""
    begin = time.thread_time()
    with pytest.raises(ArtifactError) as caught:
        read()
    assert time.thread_time() - begin < SOON
    assert caught.value.what and caught.value.where and caught.value.why and caught.value.do
    assert len(str(caught.value)) < 2000
    return caught.value


# --- the container


def rewritten(file: Path, path: Path, *more: tuple[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as out:
        for name, data in (*members_of(file).items(), *more):
            out.writestr(name, data)
    return path


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "native/../x.o", "plan.txt\\x", "évil.txt",
                                  "native/0123456789abcdef.so", "graph.txt "])
def test_names_that_do_not_belong(file: Path, tmp_path: Path, name: str) -> None:
    assert "name" in refused(lambda: check(rewritten(file, tmp_path / "x.any", (name, b"x")))).why


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_members_twice_compressed_with_a_comment_or_missing(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.any"
    assert "twice" in refused(lambda: check(rewritten(file, path, ("graph.txt", b"x")))).why
    assert "compressed" in refused(lambda: check(rewritten(file, path, method=zipfile.ZIP_DEFLATED))).why
    path.write_bytes(file.read_bytes()[:-2] + b"\x03\x00abc")
    assert "comment" in refused(lambda: check(path)).why
    members = members_of(file)
    for name in ("graph.txt", "plan.txt", "weights.safetensors"):
        left = {key: data for key, data in members.items() if key != name}
        assert name in refused(lambda left=left: check(with_members(path, left))).why
    path.write_bytes(b"")
    with pytest.raises(ArtifactError, match="cannot be read"):
        check(path)


def test_entries_that_overlap_or_disagree(file: Path, tmp_path: Path) -> None:
    whole = bytearray(file.read_bytes())
    size, begin = struct.unpack_from("<2L", whole, len(whole) - 10)
    entries, at = [], begin
    while at < begin + size:
        entries.append(at)
        at += 46 + sum(struct.unpack_from("<3H", whole, at + 28))
    path = tmp_path / "x.any"

    def changed(at: int, kind: str, value: int) -> ArtifactError:
        own = bytearray(whole)
        struct.pack_into(kind, own, at, value)
        path.write_bytes(own)
        return refused(lambda: check(path))

    first, second = entries[:2]
    assert "do not agree" in changed(second + 42, "<L", struct.unpack_from("<L", whole, first + 42)[0]).why
    for at, kind in ((second + 24, "<L"), (second + 20, "<L"), (second + 16, "<L"), (second + 42, "<L")):
        for value in (0, 1, 2**31, 2**32 - 2):
            changed(at, kind, value)
    changed(len(whole) - 10, "<L", 2**31)
    changed(len(whole) - 6, "<L", 5)
    changed(len(whole) - 12, "<H", 9)


def test_bytes_that_were_changed_are_found(file: Path, tmp_path: Path) -> None:
    members = members_of(file)
    path = tmp_path / "x.any"
    for name in members:
        if name != "format.json":
            data = bytearray(members[name])
            data[len(data) // 2] ^= 1
            with_members(path, {**members, name: bytes(data)}, digests=False)
            assert "bytes are not those" in refused(lambda: check(path)).why
    # the numbers of weights are read only where somebody asks: any bits are numbers
    members["weights.safetensors"] = members["weights.safetensors"][:-1] + b"\x00"
    with_members(path, members, digests=False)
    load(path, trust_native=True).close()
    refused(lambda: load(path, trust_native=True, verify=True))


# --- texts

DEEP = 200_000
GRAPHS = {
    "deep brackets": "graph g(x: f32[b])\n  y = full(0.0 | shape=" + "[" * DEEP + "]" * DEEP
                     + ', dtype="f32")\n  return y',
    "deep parentheses": "graph g(x: f32[" + "(" * DEEP + "b" + ")" * DEEP + "])\n  return x",
    "deep calls": "graph g(x: f32[" + "max(b, " * DEEP + "1" + ")" * DEEP + "])\n  return x",
    "many signs": "graph g(x: f32[" + "-" * DEEP + "b])\n  return x",
    "powers": "graph g(x: f32[(b + c + d + e + f)**64])\n  return x",
    "a power of powers": "graph g(x: f32[" + "(" * 60 + "b + c" + ")**64" * 60 + "])\n  return x",
    "a product of sums": "graph g(x: f32[" + "*".join(f"(a{i} + b{i})" for i in range(24)) + "])\n  return x",
    "a long sum": "graph g(x: f32[" + " + ".join(f"a{i}" for i in range(70_000)) + "])\n  return x",
    "a long number": "graph g(x: f32[" + "9" * 100_000 + "])\n  return x",
    "a long attribute": "graph g(x: f32[b])\n  y = neg(x | a=" + "9" * 100_000 + ") f32[b]\n  return y",
    "2^65 bytes": "graph g(x: f32[9223372036854775807, 4])\n  return x",
    "a size below 0": "graph g(x: f32[-5])\n  return x",
    "an operator of PyTorch": 'graph g(x: f32[b])\n  y = extern(x | target="aten.from_file.default", '
                              'template=[["args", ["str", "/etc/passwd"]], ["kwargs"]], effect=False) f32[b]\n'
                              "  return y",
    "too many equations": "graph g(x: f32[b])\n" + "".join(f"  y{i} = neg(x) f32[b]\n" for i in range(300_000))
                          + "  return x",
    "a read before the definition": "graph g(x: f32[b])\n  y = neg(z) f32[b]\n  return y",
    "a type that lies": "graph g(x: f32[b])\n  y = neg(x) f32[2*b]\n  return y",
    "an unknown op": "graph g(x: f32[b])\n  y = __import__(x) f32[b]\n  return y",
    "attributes of other kinds": "graph g(x: f32[b])\n  y = sum(x | dims=\"x\", keep=[1]) f32[b]\n  return y",
    "a device": "graph g(x: f32[b] on cuda:0)\n  return x",
    "an empty text": "", "no text": "\0\1\2", "nothing at the end": "graph g(x: f32[b])",
    "a name that is code": "graph g(x: f32[__import__('os').system('true')])\n  return x",
}


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs(name: str) -> None:
    refused(lambda: parse_graph(GRAPHS[name], (), "graph.txt"))


@pytest.mark.parametrize("name", GRAPHS)
def test_plans_and_kernels(name: str) -> None:
    if GRAPHS[name]:
        text = GRAPHS[name].replace("graph g(", "plan g arena ").replace("return", "out")
        refused(lambda: parse_plan(text, "plan.txt"))
        refused(lambda: parse_kernels(GRAPHS[name].replace("graph g(", "kernel g("), "kernels.txt"))


def test_facts_that_lie_refuse_every_call(file: Path, tmp_path: Path) -> None:
    """What a graph says of its sizes is checked where it is called: the compiler has believed it."""
    members = members_of(file)
    text = members["graph.txt"].decode()
    assert "where " in text
    path = tmp_path / "x.any"
    size = re.search(r"i64\[(\w+)", text)
    assert size is not None
    lie = text.replace("where ", f"where 5 divides {size[1]}, ", 1)
    with_members(path, {**members, "graph.txt": lie.encode()})
    with load(path) as run:
        run(torch.zeros(5, 3, dtype=torch.int64))
        with pytest.raises(InputError, match="5 divides"):
            run(torch.zeros(4, 3, dtype=torch.int64))


def test_signatures_and_weights_that_do_not_fit(file: Path, tmp_path: Path) -> None:
    members = members_of(file)
    head = json.loads(members["format.json"])
    path = tmp_path / "x.any"

    def changed(change: Callable[[dict], object]) -> None:  # type: ignore[type-arg]
        own = json.loads(json.dumps(head))
        change(own)
        with_members(path, {**members, "format.json": json.dumps(own).encode()})
        refused(lambda: load(path, trust_native=True))

    changed(lambda own: own.update(format="zip"))
    changed(lambda own: own.update(weights=[]))
    changed(lambda own: own.update(weights=[[99, own["weights"][0][1]], *own["weights"][1:]]))
    changed(lambda own: own.update(weights=[*own["weights"], own["weights"][0]]))
    changed(lambda own: own["signature"].update(args=["tuple", [0, 0]]))
    changed(lambda own: own["signature"].update(results=5))
    changed(lambda own: own["signature"]["inputs"][0].update(position=0))
    changed(lambda own: own["signature"].update(inputs=[]))
    nested: object = 0
    for _ in range(50):
        nested = ["tuple", [nested]]
    changed(lambda own: own["signature"].update(results=nested))
    deep = members["format.json"][:-2] + b', "x": ' + b"[" * DEEP + b"]" * DEEP + b"}"
    with_members(path, {**members, "format.json": deep}, digests=False)
    refused(lambda: load(path))


def test_texts_of_a_file_do_not_steer_a_terminal(file: Path, tmp_path: Path) -> None:
    members, path, evil = members_of(file), tmp_path / "x.any", "\x1b[31m\r\ud800é"
    head = json.loads(members["format.json"])
    head["made_with"] = {evil: 1}
    head["signature"]["inputs"][0]["name"] = evil
    with_members(path, {**members, "format.json": json.dumps(head).encode()})
    with load(path, trust_native=True) as run:
        with pytest.raises(InputError) as caught:
            run("x")
        for said in (str(check(path)), run.describe(), str(caught.value)):
            assert "\\x1b[31m\\r\\ud800é" in said and said.replace("\n", "").isprintable()


def test_headers_that_are_too_long_are_not_read(file: Path, tmp_path: Path) -> None:
    members, path = members_of(file), tmp_path / "x.any"
    many = b'{"x": [' + b"{}," * (3 << 20) + b"1]}"
    with_members(path, {**members, "format.json": many}, digests=False)
    assert "bytes of JSON" in refused(lambda: check(path)).why
    with_members(path, {**members, "weights.safetensors": len(many).to_bytes(8, "little") + many})
    assert "bytes of JSON" in refused(lambda: check(path)).why


# --- machine code


def objects_of(file: Path) -> dict[str, bytes]:
    return {name: data for name, data in members_of(file).items() if name.endswith(".o")}


def test_changed_objects_are_loaded_or_refused_and_never_crash(file: Path) -> None:
    draw = random.Random(7)
    names, outcomes = objects_of(file), [0, 0]
    for _ in range(300):
        name = draw.choice(sorted(names))
        data = changed_bytes(names[name], draw)
        try:
            check_object(name, data)
            LoadedObjects({name: data})
            outcomes[0] += 1
        except ArtifactError as error:
            assert error.why and error.do
            outcomes[1] += 1
    assert all(outcomes)


def test_memory_is_written_or_executed_never_both(file: Path) -> None:
    from anyshape.artifact.format.container import Container
    opened = Container(file)
    code = native_code(opened)
    opened.close()
    begin = code.loaded.base
    rights = [line.split()[1] for line in Path("/proc/self/maps").read_text().splitlines()
              if int(line.split("-")[0], 16) <= begin < int(line.split()[0].split("-")[1], 16)]
    assert rights == ["r-xp"] or rights == ["r-xs"]


# --- many files


def fuzz(file: Path, folder: Path, count: int, seed: int) -> list[int]:
    """Reads changed files; how many were read, and how many refused."""
    outcomes = [0, 0]
    for what, path in mutants(file, folder, count, seed):
        begin = time.thread_time()
        try:
            check(path)
            outcomes[0] += 1
        except ArtifactError as error:
            assert error.what and error.why and error.do, what
            outcomes[1] += 1
        except BaseException as error:
            error.add_note(what)
            raise
        assert time.thread_time() - begin < SOON, what
    return outcomes


def test_changed_files_are_read_or_refused(file: Path, tmp_path: Path) -> None:
    read, not_read = fuzz(file, tmp_path, 300, 1)
    assert read and not_read > read


@pytest.mark.full
def test_a_hundred_thousand_changed_files(file: Path, tmp_path: Path) -> None:
    read, not_read = fuzz(file, tmp_path, 100_000, 2)
    assert read and not_read > read


def test_windows_that_are_inside_at_all_sizes() -> None:
    n, m = symbol("n"), symbol("m")
    half, below = (n + 1) // 2, (n - 1) // 2
    kinds = [(4 * n * m, (n, m), None, 0, True), (4 * n * m, (m, n), None, 0, True),
             (4 * n * m, (n, m), (1, n), 0, True),
             (4 * n * m, (n, 1, m), (m, 7, 1), 0, True), (4 * m, (1, n, m), (0, 0, 1), 0, False),
             (4 * half * m, (half, 1, m), (m, m, 1), 0, True), (4 * half, (half,), None, 1, False),
             (4 * below, (below,), None, 0, False), (4 * ((n + 1) // m), ((n + 1) // m,), None, 0, False),
             (4 * n * m, (n, 3, m), (m, 0, 1), 0, False), (4 * n * m, (n, m), (1, m), 0, False),
             (4 * n * m, (n, m), None, 1, False), (4 * n * m - 4, (n, m), None, 0, False),
             (4 * n * m, (n - 1, m), None, 0, False), (4 * (n - 1) * m, (n - 1, m), None, 0, False),
             (48, (3, 4), None, 0, True), (48, (3, 4), None, 1, False), (48, (3, 4), (-4, 1), 8, True),
             (48, (3, 4), (-4, 1), 7, False), (44, (3, 4), None, 0, False), (48, (-3, -4), None, 0, False),
             (48, (3, 2), (4, 1), 2, True), (48, (0, 1 << 60), None, 0, True)]
    for bytes_, shape, strides, offset, wanted in kinds:
        found = is_inside(bytes_, TensorType("f32", shape, strides), offset, {"n", "m"})
        assert found is wanted, (bytes_, shape, strides, offset)
    assert not is_inside(4 * n, TensorType("f32", (n,)), 0, {"m"})  # n may be below 0
