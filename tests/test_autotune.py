"""Which routine multiplies: by what was measured, by the processor's features, or as it is set; kept per machine."""
from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest
import torch

import anyshape
from anyshape.backend import measurements
from anyshape.backend.cpu import autotune
from anyshape.backend.cpu.autotune import KINDS, Autotune, machine_key, usual
from anyshape.backend.cpu.bytecode import format as host
from anyshape.backend.cpu.bytecode.products import FULL, MANY, Fixed, does
from anyshape.backend.cpu.machine import target as limits
from anyshape.backend.cpu.target import target_of
from anyshape.backend.measurements import Measurements, key_of
from anyshape.backend.targets import host_routines
from anyshape.base.config import Config
from anyshape.base.disk_cache import DiskCache
from anyshape.base.errors import ConfigError
from anyshape.tools import cli

AMD = limits.target_of("x86_64-unknown-linux-gnu", "znver9", frozenset(("avx512f", "avx512bw", "avx512vl", "sse4a")))
INTEL = limits.target_of("x86_64-unknown-linux-gnu", "new", frozenset(("avx512f", "avx512bw", "avx512vl")))
HAS = [kind for kind, one in KINDS.items() if does(one.dtype, Fixed(limits.host(), True))]
kinds = pytest.mark.parametrize("kind", HAS)


@pytest.fixture
def gains(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What measuring a kind gives; what is not in it may not be measured."""
    found: dict[str, float] = {}
    monkeypatch.setattr(autotune, "measured", lambda native, kind: found[kind])
    return found


def tune(folder: Path | None, mode: str = "measured") -> Autotune:
    cache = None if folder is None else DiskCache(str(folder))
    return Autotune(host_routines(), Measurements(cache, machine_key(limits.host())), mode)


def ops_of(fast) -> set[int]:
    record, = fast.programs[0].executable.specializations.values()
    found, at = set(), record.payload.words[host.HEAD_FIRST]
    while record.payload.words[at] != host.END:
        found.add(record.payload.words[at])
        at += record.payload.words[at + 1]
    return found


@kinds
def test_the_faster_one_is_taken_whatever_the_processor(kind, gains, tmp_path) -> None:
    for number, target in enumerate((AMD, INTEL)):
        for gain in (0.2, 5.0):
            gains[kind] = gain
            one = tune(tmp_path / f"{number}{gain}")
            one.machine = dataclasses.replace(limits.host(), cpu=target.cpu,
                                              features=f"{limits.host().features},+{number}")
            assert one.ours(kind) is (gain > 1)


def test_noise_does_not_change_what_is_usual(gains, tmp_path, monkeypatch) -> None:
    for default in (True, False):
        monkeypatch.setattr(autotune, "usual", lambda *_, default=default: default)
        for kind in KINDS:
            gains[kind] = 1.01 if not default else 0.99
            assert tune(None).ours(kind) is default


def test_by_features_where_nothing_is_measured(gains) -> None:
    assert usual(FULL, AMD) and usual(MANY, AMD) and not usual(FULL, INTEL)
    assert not usual(FULL, limits.target_of("x86_64", "znver3", frozenset(("avx2", "sse4a"))))
    for kind in KINDS:
        assert tune(None, "usual").ours(kind) is usual(kind, limits.host())
    assert Config.make(calibrate=False).products_mode == "usual"
    assert Config.make(calibrate=False, products="own").products_mode == "own"


def test_what_cannot_be_measured_is_as_usual(monkeypatch) -> None:
    def fails(*_):
        raise RuntimeError("no memory")
    monkeypatch.setattr(autotune, "_in_turn", fails)
    for kind in KINDS:
        assert tune(None).ours(kind) is usual(kind, limits.host())


@kinds
def test_the_real_thing(kind) -> None:
    gain = autotune.measured(host_routines(), kind)
    assert 1e-3 < gain < 1e3


def test_measuring_leaves_the_threads_of_others_as_they_are() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        autotune.measured(host_routines(), FULL)
        assert torch.get_num_threads() == 3
        assert not any(thread.name == "anyshape autotune" for thread in threading.enumerate())
    finally:
        torch.set_num_threads(before)


def test_it_is_set_and_seen(gains, tmp_path, monkeypatch, capsys) -> None:
    x, w = torch.randn(40, 256), torch.randn(256, 128)
    fast = {products: anyshape.compile(lambda x, w: x @ w, strict=True, products=products)
            for products in ("own", "library")}
    for products, op in (("own", host.PRODUCT), ("library", host.MATMUL)):
        exact = x.double() @ w.double()  # no order of the 256 terms is eager's alone: ours is as near as its own is
        assert (fast[products](x, w) - exact).abs().max() <= 2 * (x @ w - exact).abs().max()
        assert ops_of(fast[products]) == {op}
    with pytest.raises(ConfigError, match="measured, own, library, usual"):
        anyshape.compile(torch.matmul, products="mine")
    gains.update(dict.fromkeys(KINDS, 2.5))
    kept = Measurements(DiskCache(str(tmp_path)), machine_key(limits.host()))
    monkeypatch.setattr(autotune, "_measurements", lambda _: kept)
    target_of.cache_clear()
    try:
        seen = anyshape.compile(lambda x, w: x @ w, strict=True, calibrate=True)
        seen(x, w)
        assert ops_of(seen) == {host.PRODUCT}
        assert seen.explain().programs[0].libraries[0].why.startswith("by ours (2.50): ours run at so many times")
        assert "a native routine does it, by ours" in str(seen.explain())
        monkeypatch.setenv("ANYSHAPE_CALIBRATE", "1")
        assert cli.main(["machine"]) == 0
        assert "f32                 ours      2.50" in capsys.readouterr().out
        gains.update(dict.fromkeys(KINDS, 0.1))
        assert cli.main(["machine", "--again"]) == 0
        assert "f32                 BLAS      0.10" in capsys.readouterr().out
    finally:
        target_of.cache_clear()


# ---- what is kept


def test_the_first_process_decides(gains, tmp_path) -> None:
    gains[FULL] = 3.0
    assert tune(tmp_path).ours(FULL)
    gains[FULL] = 0.1
    assert tune(tmp_path).ours(FULL)
    assert not tune(None).ours(FULL)
    assert not tune(tmp_path / "other").ours(FULL)


def test_of_two_at_once_the_second_takes_what_is_there(gains, tmp_path, monkeypatch) -> None:
    def slowly(context, kind):
        gains[kind] = 3.0
        monkeypatch.setattr(autotune, "measured", lambda native, kind: gains[kind])
        assert tune(tmp_path).ours(kind)  # another process, meanwhile
        return 0.1
    monkeypatch.setattr(autotune, "measured", slowly)
    late = tune(tmp_path)
    assert late.ours(FULL) and late.gain(FULL) == 3.0


@pytest.mark.parametrize("damage", [b"", b"anyshape", b"x" * 100, None])
def test_a_file_that_is_damaged_or_foreign_is_measured_again(damage, gains, tmp_path) -> None:
    gains[FULL] = 3.0
    assert tune(tmp_path).ours(FULL)
    cache = DiskCache(str(tmp_path))
    key = key_of(autotune._name(FULL), machine_key(limits.host()))
    if damage is None:
        cache.put(key, b"not a number")
    else:
        Path(cache.path(key)).write_bytes(damage)
    gains[FULL] = 0.1
    assert not tune(tmp_path).ours(FULL)
    gains[FULL] = 3.0
    assert not tune(tmp_path).ours(FULL)


def test_a_machine_has_its_own(gains, tmp_path, monkeypatch) -> None:
    gains[FULL] = 3.0
    assert tune(tmp_path).ours(FULL)
    gains[FULL] = 0.1
    monkeypatch.setattr(autotune, "model", lambda: "another processor")
    assert not tune(tmp_path).ours(FULL)
    monkeypatch.undo()
    assert tune(tmp_path).ours(FULL)


def test_a_folder_that_cannot_be_written_costs_a_warning(gains, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    gains[FULL] = 3.0
    with pytest.warns(RuntimeWarning, match="cannot keep"):
        assert tune(tmp_path / "file").ours(FULL)


def test_a_file_system_without_links(gains, tmp_path, monkeypatch) -> None:
    def refused(*_):
        raise OSError("not permitted")
    monkeypatch.setattr("os.link", refused)
    gains[FULL] = 3.0
    assert tune(tmp_path).ours(FULL)
    gains[FULL] = 0.1
    assert tune(tmp_path).ours(FULL)
    assert measurements.NUMBER.size == 8
