"""The examples: they run as a user would run them, and what they promise holds."""
from __future__ import annotations

import csv
import importlib.util
import resource
import shutil
import signal
from pathlib import Path
from types import ModuleType

import pytest
import torch

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
    shutil.move(four, tmp_path / "whole")
    torch.manual_seed(99)  # the checkpoint, not this process, says what the random numbers are
    assert example.main(options(model, out, "--steps", "4", "--resume")) == 0
    assert losses(out) == whole
    assert [path.name for path in example.checkpoints(out)] == [four.name], "--keep is 1 now"
    assert not two.exists()
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (four / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    found, expected = (torch.load(path / "training.pt", weights_only=True) for path in (four, tmp_path / "whole"))
    assert found["position"] == expected["position"] and torch.equal(found["random"], expected["random"])
    for number, state in expected["optimizer"]["state"].items():
        assert all(torch.equal(found["optimizer"]["state"][number][name], value) for name, value in state.items())


class Stepped:
    """Stands for a compiled step: no training, and Ctrl-C in the third call."""

    def __init__(self, model: object, loss: object, optimizer: torch.optim.Optimizer, **_: object) -> None:
        optimizer._opt_called = True  # for schedulers, as a step does
        self.calls = 0
        self.norm = torch.ones(())
        self.programs: list[object] = []

    def __call__(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3:
            signal.raise_signal(signal.SIGINT)
        return torch.ones(())

    def state_dict(self) -> dict[str, object]:
        return {}


def test_ctrl_c_saves_and_says_how_to_go_on(example: ModuleType, model: Path, tmp_path: Path,
                                            capsys: pytest.CaptureFixture[str],
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example.anyshape, "train_step", Stepped)
    before = signal.getsignal(signal.SIGINT)
    assert example.main(options(model, tmp_path)) == example.STOPPED
    assert "stopped after step 3; go on with --resume" in " ".join(capsys.readouterr().out.split())
    assert signal.getsignal(signal.SIGINT) is before
    assert torch.load(tmp_path / "checkpoint-000003" / "training.pt", weights_only=True)["position"] == 3
    assert example.main(options(model, tmp_path)) == 1
    assert "has checkpoints of an earlier run" in capsys.readouterr().err
    assert example.main(options(model, tmp_path, "--resume", "--seed", "5")) == 1
    assert "--seed 5 contradicts the checkpoint" in capsys.readouterr().err


def test_a_full_disk_keeps_the_checkpoint_before(example: ModuleType, model: Path, tmp_path: Path) -> None:
    loaded = example.AutoModelForCausalLM.from_pretrained(model)
    tokenizer = example.AutoTokenizer.from_pretrained(model)
    state = {"step": 1, "random": torch.zeros(100_000)}
    example.save(tmp_path, 1, loaded, tokenizer, state)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        for most in (10_000, 200_000):  # of a file: the weights do not fit; the weights do, the rest does not
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))  # the real thing: write() fails half way
            with pytest.raises(example.SaveError, match=r"could not be written(.|\n)*checkpoint-000001"):
                example.save(tmp_path, 1, loaded, tokenizer, {**state, "step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000001"]


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
