"""The examples: they run as a user would run them, and what they promise holds."""
from __future__ import annotations

import csv
import importlib.util
import resource
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import anyshape

pytest.importorskip("transformers", reason="the example trains a model of transformers: install anyshape[bench]")
pytest.importorskip("tokenizers", reason="the example makes a vocabulary: install anyshape[demo]")
pytest.importorskip("safetensors", reason="the example writes safetensors: install anyshape[demo]")

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("finetune", EXAMPLES / "finetune_transformers.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(example: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a pretrained model of one small layer with dropout, its tokenizer, and texts.txt."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("model")
    texts = example.read_texts(None)[:60]
    (folder / "texts.txt").write_text("\n\n".join(texts), encoding="utf-8")
    _, tokenizer = example.make_model(example.arguments([]), texts)
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=64,
                               bos_token_id=0, eos_token_id=0)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def options(model: Path, out: Path, *more: str) -> list[str]:
    words = f"--model {model} --texts {model / 'texts.txt'} --out {out} --tokens 128 --longest 48 --warm-up 2"
    return [*words.split(), "--evaluate-every", "4", "--save-every", "2", *more]


def losses(out: Path) -> list[tuple[str, ...]]:
    """All of the log but the speed."""
    with (out / "log.csv").open(newline="") as file:
        return [tuple(value for name, value in row.items() if name != "tokens_per_second")
                for row in csv.DictReader(file)]


@pytest.mark.unguarded
def test_a_resumed_run_is_bit_equal(example: ModuleType, model: Path, tmp_path: Path,
                                    capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert example.main(options(model, out, "--steps", "4", "--keep", "2")) == 0
    whole, (two, four) = losses(out), example.checkpoints(out)
    assert [row[0] for row in whole] == ["1", "2", "3", "4"] and whole[3][-1]
    assert "programs served all shapes" in capsys.readouterr().out
    model_file = (out / "model.safetensors").read_bytes()
    shutil.move(four, tmp_path / "whole")
    torch.manual_seed(99)  # the checkpoint, not this process, says what the random numbers are
    assert example.main(options(model, out, "--steps", "4", "--resume")) == 0
    assert losses(out) == whole
    assert [path.name for path in example.checkpoints(out)] == [four.name], "--keep is 1 now"
    assert not two.exists()
    assert (out / "model.safetensors").read_bytes() == model_file
    for path in (four, tmp_path / "whole"):
        dcp_to_torch_save(path, path / "all.pt")
    found, expected = (torch.load(path / "all.pt", weights_only=True) for path in (four, tmp_path / "whole"))
    assert found["others"] == expected["others"] and torch.equal(found["random"]["0"], expected["random"]["0"])
    for name, state in expected["optimizer"]["state"].items():
        assert all(torch.equal(found["optimizer"]["state"][name][key], value) for key, value in state.items())
    loaded = example.AutoModelForCausalLM.from_pretrained(out)
    weights = expected["model"]
    assert all(torch.equal(one, weights[name]) for name, one in loaded.state_dict().items())
    assert example.AutoTokenizer.from_pretrained(out)("a b")


class Stepped:
    """Stands for a compiled step: no training, and something else in the third call."""

    def __init__(self, then: Callable[[], object], *given: Any, **_: object) -> None:
        self.step = anyshape.train_step(*given)
        self.then = then
        self.step.settings.optimizer._opt_called = True  # for schedulers, as a step does
        self.norm = torch.ones(())
        self.programs: list[object] = []
        self.save, self.load = self.step.save, self.step.load

    def __call__(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.step.count += 1
        if self.step.count == 3:
            self.then()
        return torch.ones(())


def stepped(monkeypatch: pytest.MonkeyPatch, example: ModuleType, then: Callable[[], object]) -> None:
    monkeypatch.setattr(example, "anyshape", SimpleNamespace(
        train_step=partial(Stepped, then), compile=anyshape.compile, consolidate=anyshape.consolidate,
        AnyShapeError=anyshape.AnyShapeError))


def test_ctrl_c_saves_and_says_how_to_go_on(example: ModuleType, model: Path, tmp_path: Path,
                                            capsys: pytest.CaptureFixture[str],
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    stepped(monkeypatch, example, lambda: signal.raise_signal(signal.SIGINT))
    before = signal.getsignal(signal.SIGINT)
    assert example.main(options(model, tmp_path)) == example.STOPPED
    assert "stopped after step 3; go on with --resume" in " ".join(capsys.readouterr().out.split())
    assert signal.getsignal(signal.SIGINT) is before
    assert [path.name for path in example.checkpoints(tmp_path)] == ["step-000000003"]
    assert example.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert example.main(options(model, tmp_path)) == 1
    assert "has checkpoints of an earlier run" in capsys.readouterr().err
    assert example.main(options(model, tmp_path, "--resume", "--seed", "5")) == 1
    assert "--seed 5 contradicts the checkpoint" in capsys.readouterr().err


def test_a_full_disk_keeps_the_checkpoint_before(example: ModuleType, model: Path, tmp_path: Path,
                                                 capsys: pytest.CaptureFixture[str],
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # the real thing: write() fails half way
    stepped(monkeypatch, example, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1])))
    monkeypatch.setattr(example, "held_out_loss", lambda *_: 1.0)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        assert example.main(options(model, tmp_path, "--steps", "4")) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    told = " ".join(capsys.readouterr().out.split())
    assert "step 4 could not be written" in told and "the last whole one is step-000000002" in told
    assert [path.name for path in example.checkpoints(tmp_path)] == ["step-000000002"]


@pytest.mark.parametrize(("words", "message"), [
    (("--resume",), "has no checkpoint"),
    (("--texts", "nowhere.txt"), "nowhere.txt"),
    (("--memory-limit", "much"), "a number of bytes"),
])
def test_bad_options_are_clear_messages(example: ModuleType, model: Path, tmp_path: Path, words: tuple[str, ...],
                                        message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(options(model, tmp_path / "out", *words)) == 1
    assert message in capsys.readouterr().err


def test_a_file_is_no_folder(example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert example.main(["--out", str(tmp_path / "file")]) == 1
    assert "File exists" in capsys.readouterr().err


def test_help_says_the_defaults(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        example.arguments(["--help"])
    assert "(default: 1024)" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(SystemExit, match="2"):
        example.arguments(["--steps", "0"])
    assert "--steps must be at least 1" in capsys.readouterr().err
