"""Drivers of GPUs: what is said where there is none, an old one, no device or no memory; and graphs whose tensors are
on devices that programs are not compiled for run as PyTorch, counted, with the reason."""
from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import anyshape
from anyshape.backend.targets import TARGETS, target_of
from anyshape.backend.triton import gpu, toolchain
from anyshape.backend.triton.driver.driver import DeviceDriver, open_driver
from anyshape.base.config import Config
from anyshape.base.errors import AnyShapeError, DeviceError
from anyshape.tools.cli import main
from anyshape.tools.demo import command
from fake_driver import FakeDriver

HAS_DRIVER = torch.cuda.is_available()


def parts(error: pytest.ExceptionInfo[DeviceError]) -> tuple[str, str, str]:
    assert error.value.what and error.value.why and error.value.do
    return error.value.what, error.value.why, error.value.do


@pytest.mark.skipif(HAS_DRIVER, reason="there is a driver")
@pytest.mark.parametrize("kind", ("cuda", "hip"))
def test_without_a_driver(kind: str) -> None:
    with pytest.raises(DeviceError) as error:
        open_driver(kind)
    what, why, do = parts(error)
    assert "there is no driver of" in what and "lib" in why and "install" in do
    with pytest.raises(DeviceError, match="there is no driver of NVIDIA"):
        target_of(Config(), "cuda:0")


def test_an_old_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDriver()
    monkeypatch.setattr(fake, "version", lambda pointer: fake._put_int(pointer, 11040))
    with pytest.raises(DeviceError) as error:
        DeviceDriver("cuda", fake.addresses)
    assert parts(error)[1] == "it has version 11040, the least is 12000"
    del fake.addresses["launch"]
    with pytest.raises(DeviceError, match="it has no cuLaunchKernel"):
        DeviceDriver("cuda", fake.addresses)


HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@pytest.mark.parametrize(("kind", "name", "value"), (
    ("cuda", "CUDA_VISIBLE_DEVICES", ""), ("hip", "HIP_VISIBLE_DEVICES", ""), ("hip", "ROCR_VISIBLE_DEVICES", "-1"),
    ("cuda", "", ""), ("hip", "", "")))
def test_no_visible_device(monkeypatch: pytest.MonkeyPatch, kind: str, name: str, value: str) -> None:
    for other in HIDING:
        monkeypatch.delenv(other, raising=False)
    if name:
        monkeypatch.setenv(name, value)
    fake = FakeDriver()
    fake.fails["init"] = 100
    with pytest.raises(DeviceError) as error:
        DeviceDriver(kind, fake.addresses)
    what, why, do = parts(error)
    assert what == f"the driver of {dict(cuda='NVIDIA', hip='AMD')[kind]} shows no device"
    assert (f"{name} of the environment is {value!r}" in why and f"unset {name}" in do) == bool(name)


def test_a_driver_that_does_not_start() -> None:
    fake = FakeDriver()
    fake.fails["init"] = 999
    with pytest.raises(DeviceError) as error:
        DeviceDriver("cuda", fake.addresses)
    assert "error 999" in parts(error)[1]


def test_no_memory() -> None:
    fake = FakeDriver(limit=1 << 20)
    driver = DeviceDriver("cuda", fake.addresses)
    fake.fails["allocate_host"] = 2
    with pytest.raises(DeviceError) as error:
        driver.pinned(4096)
    what, why, do = parts(error)
    assert "not enough memory" in what and why.startswith("1048576 of 1048576 bytes are free") and "memory_limit" in do
    assert error.value.where == "cuMemHostAlloc"


def test_the_same_table_by_the_names_of_hip() -> None:
    fake = FakeDriver()
    addresses = {name: address for name, address in fake.addresses.items() if name != "set_function_attribute"}
    fake.version = lambda pointer: fake._put_int(pointer, 60032830)  # type: ignore[method-assign]
    driver = DeviceDriver("hip", addresses)
    assert driver.name() == "fake" and driver.memory() == 1 << 40
    handle = driver.function(fake.register("k", lambda grid, params: None, ()), "k", 60 << 10)
    assert handle in fake.handles and not fake.shared


def test_a_margin_that_is_written_is_told() -> None:
    fake = FakeDriver()
    piece = fake.take(100, 0)
    piece.memory[piece.address - 1 - ctypes.addressof(piece.memory)] = 0
    fake.give(piece)
    fake.everything()
    assert fake.alarms == ["a write outside of 512 bytes"]


def test_a_device_without_a_target_runs_as_pytorch() -> None:
    torch._dynamo.reset()
    fast = anyshape.compile(lambda x: torch.softmax(x, 1) + 1)
    assert fast(torch.empty(3, 4, device="meta")).shape == (3, 4)
    text = str(fast.explain())
    assert "there is no target for the device meta" in text, text


def test_a_graph_on_two_devices_runs_as_pytorch() -> None:
    torch._dynamo.reset()
    fast = anyshape.compile(lambda x: (torch.softmax(x, 1), x.to("meta") + 1))
    x = torch.randn(3, 4)
    found, other = fast(x)
    torch.testing.assert_close(found, torch.softmax(x, 1))
    assert other.is_meta
    text = str(fast.explain())
    assert "several devices" in text or "copy between devices" in text, text


def old(fake: FakeDriver, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fake, "version", lambda pointer: fake._put_int(pointer, 11040))


def hidden(fake: FakeDriver, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("CUDA_VISIBLE_DEVICES", "")
    fake.fails["init"] = 100


def no_triton(fake: FakeDriver, patch: pytest.MonkeyPatch) -> None:
    toolchain.module.cache_clear()
    patch.setitem(sys.modules, "triton", None)


def other_triton(fake: FakeDriver, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(toolchain.module("triton"), "__version__", "2.1.0")


def old_card(fake: FakeDriver, patch: pytest.MonkeyPatch) -> None:
    attribute = fake.device_attribute
    patch.setattr(fake, "device_attribute", lambda pointer, name, device: fake._put_int(pointer, 6) if name == 75
                  else attribute(pointer, name, device))


def hidden_for_hip(fake: FakeDriver, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("HIP_VISIBLE_DEVICES", "")
    patch.setattr(gpu, "is_hip", lambda: True)
    fake.fails["init"] = 100


MISSING: dict[str, tuple[Callable[[FakeDriver, pytest.MonkeyPatch], None], str, str, str]] = {
    "an old driver": (old, "cuda", "the driver of NVIDIA is too old", "install a newer driver"),
    "a hidden card": (hidden, "cuda", "the driver of NVIDIA shows no device", "unset CUDA_VISIBLE_DEVICES"),
    "a hidden card of AMD": (hidden_for_hip, "cuda", "the driver of AMD shows no device", "unset HIP_VISIBLE_DEVICES"),
    "no Triton": (no_triton, "cuda:0", "Triton, which is not installed", "pip install 'anyshape[gpu]'"),
    "another Triton": (other_triton, "cuda:0", "Triton 2.1.0 is not known", "install one of these"),
    "another number": (lambda fake, patch: None, "cuda:3", "there is no device cuda:3", "name another one"),
    "an old card": (old_card, "cuda:0", "fake is too old", "use another card")}


def runs_as_pytorch(what: str, do: str) -> None:
    """Calls of tensors on the device `meta`: counted, with one warning, and under strict they are an error."""
    torch._dynamo.reset()
    anyshape.reset_stats()
    fast = anyshape.compile(lambda x: torch.softmax(x, 1) + 1)
    with pytest.warns(UserWarning, match=what):
        assert fast(torch.empty(3, 4, device="meta")).shape == (3, 4)
    assert fast(torch.empty(5, 4, device="meta")).shape == (5, 4)
    (reason, calls), = fast.explain().eager
    assert anyshape.stats()["eager_calls"] == calls == 2 and what in reason
    assert do in " ".join(str(fast.explain()).split())
    with pytest.raises(AnyShapeError) as error:
        anyshape.compile(lambda x: torch.softmax(x, 1) + 2, strict=True)(torch.empty(3, 4, device="meta"))
    assert what in str(error.value) and do in str(error.value)


@pytest.mark.skipif(HAS_DRIVER, reason="there is a driver")
@pytest.mark.parametrize("name", MISSING)
def test_what_a_device_lacks_is_said(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                     capsys: pytest.CaptureFixture[str]) -> None:
    """By the demo, before it begins, and where a target is asked for: a graph on such a device runs as PyTorch."""
    lack, device, what, do = MISSING[name]
    anyshape.compile(torch.softmax)(torch.ones(2, 3), 1)  # Dynamo's first trace imports Triton, where there is one
    fake = FakeDriver()
    with monkeypatch.context() as patch:
        lack(fake, patch)
        patch.setattr(gpu, "open_driver", lambda kind: DeviceDriver(kind, fake.addresses, fake))
        assert main(["demo", "--device", device, "--out", str(tmp_path)]) == 1
        told = capsys.readouterr().err
        assert what in told and do in told and "why:" in told, told
        with pytest.raises(DeviceError) as error:
            target_of(Config(), device)
        assert what in error.value.what and do in error.value.do
        if device == "cuda:0":  # in place of which there are tensors of another device, whose target it is
            there = functools.partial(gpu.device_target_of, device=device)
            patch.setattr(gpu, "device_target_of", lambda cache, products, device, graphs: there(cache, products))
            patch.setitem(TARGETS, "meta", gpu.__name__)
            runs_as_pytorch(what, do)
    toolchain.module.cache_clear()


@pytest.mark.skipif(HAS_DRIVER, reason="there is a driver")
@pytest.mark.parametrize(("device", "words"), (("cuda", "there is no driver of NVIDIA"),
                                               ("xpu", "there is no target for the device xpu")))
def test_the_demo_says_what_is_missing(device: str, words: str, tmp_path: Path,
                                       capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--device", device, "--out", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert words in told and "why:" in told and "do:" in told


def test_the_demo_on_a_card_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    """PyTorch's error, of weights that do not fit, in the words of a program that does not."""
    def full(*arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB.\nof which others hold 79 GiB")

    monkeypatch.setattr(command, "target_of", lambda config, device: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command, "_session", full)
    assert main(["demo", "--device", "cuda", "--out", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert "error: the device has not enough memory" in told and "do:" in told
    assert "why:   CUDA out of memory. Tried to allocate 20 MiB." in told and "79 GiB" not in told
