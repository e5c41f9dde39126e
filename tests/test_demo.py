"""The demo: batches keep their budget, a resumed run is bit-equal, Ctrl-C and a full disk keep the checkpoint."""

from __future__ import annotations

import argparse
import gc
import json
import resource
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

pytest.importorskip("tokenizers", reason="the demo trains a vocabulary: install anyshape[demo]")
pytest.importorskip("safetensors", reason="the demo writes safetensors: install anyshape[demo]")
pytest.importorskip("matplotlib", reason="the demo draws a picture: install anyshape[demo]")

import anyshape
from anyshape.base.errors import AnyShapeError, ConfigError, InputError, OutputError
from anyshape.dist.mesh import mesh_of
from anyshape.dist.strategies import strategy_of
from anyshape.frontend.checkpoint.folder import checkpoints
from anyshape.tools import demo
from anyshape.tools.demo import (
    backends,
    compare,
    data,
    limit,
    measure,
    ranks,
    report,
    training,
)
from anyshape.tools.demo.model import IGNORED, DemoConfig, DemoLlama
from anyshape.tools.demo.show import chart, display

TINY = training.Recipe(
    seed=3, tokens=320, longest=160, model=DemoConfig(vocabulary=320, hidden=32, inner=48, layers=2, heads=2)
)
LIBRARY = Path(json.__file__).parent


@pytest.fixture(scope="module")
def documents() -> list[str]:
    """The functions and classes of a few packages: enough to hold some out, read in a blink."""
    found = data.read_documents(LIBRARY) + data.read_documents(LIBRARY.parent / "email")
    return found[:100]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of Python files for runs through the command line."""
    for name in ("decoder.py", "encoder.py", "scanner.py"):
        (tmp_path / name).write_text((LIBRARY / name).read_text(encoding="utf-8"))
    for name in ("header.py", "message.py", "utils.py", "_header_value_parser.py"):
        (tmp_path / name).write_text((LIBRARY.parent / "email" / name).read_text(encoding="utf-8"))
    return tmp_path


def run_to(documents: list[str], steps: int, out: Path, session: training.Session | None = None) -> training.Session:
    """Train a session with eager up to `steps`, saving in `out`."""
    session = session or training.start(TINY, documents)
    backend = backends.make("eager", session.model, session.optimizer)
    outcome = training.train(session, backend, steps, out, 1000, training.StopRequest(), lambda _: None)
    assert outcome == training.Outcome(True)
    return session


def resumed_from(folder: Path, documents: list[str]) -> training.Session:
    """The session of a checkpoint, loaded to go on with eager."""
    session = training.go_on(training.stored_in(folder), documents)
    session.load(backends.make("eager", session.model, session.optimizer), folder)
    return session


def same_weights(left: training.Session, right: training.Session) -> bool:
    """Whether weights and optimiser state are equal bit for bit."""
    pairs = list(zip(left.model.parameters(), right.model.parameters(), strict=True))
    return all(torch.equal(a, b) for a, b in pairs) and all(
        torch.equal(left.optimizer.state[a][name], right.optimizer.state[b][name])
        for a, b in pairs for name in training.MOMENTS)


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(words)


def test_documents_are_functions_and_classes_in_a_fixed_order() -> None:
    source = "import os\n\n@cached\ndef first():\n    return 1\n\n"
    source += "class Long:\n    x = 1\n\n    def method(self):\n        return 2\n"
    source += "\n" * data.LONGEST_CLASS + "    def last(self): pass\n"
    assert list(data.documents_of(source)) == [
        "@cached\ndef first():\n    return 1\n",
        "def method(self):\n    return 2\n",
        "def last(self): pass\n",
    ]
    assert data.read_documents(LIBRARY) == data.read_documents(LIBRARY)


def test_batches_keep_the_budget_and_vary(documents: list[str]) -> None:
    corpus = data.encode(documents, data.train_vocabulary(documents, 320))
    stream = data.BatchStream(corpus.training, budget=TINY.tokens, longest=TINY.longest, seed=3)
    batches = stream.first(60)
    assert all(batch.tokens.numel() <= TINY.tokens for batch in batches)
    assert max(batch.tokens.shape[1] for batch in batches) == TINY.longest
    assert len({batch.tokens.shape for batch in batches}) >= 10


def test_an_epoch_gives_every_document_once(documents: list[str]) -> None:
    corpus = data.encode(documents, data.train_vocabulary(documents, 320))
    stream = data.BatchStream(corpus.training, budget=TINY.tokens, longest=TINY.longest, seed=3)
    cursor = data.Cursor()
    tokens = 0
    while cursor.epoch == 0:
        batch, cursor = stream.take(cursor)
        tokens += batch.real
    assert tokens == sum(min(len(document) - 1, TINY.longest) for document in corpus.training)
    first, second = stream.take(data.Cursor(0, 0))[0], stream.take(data.Cursor(1, 0))[0]
    assert not torch.equal(first.tokens, second.tokens)


def test_padding_is_masked_and_does_not_reach_the_loss() -> None:
    short, long = np.array([0, 5, 0], np.int32), np.array([0, 7, 8, 9, 0], np.int32)
    batch = data.collate([short, long])
    assert batch.tokens.tolist() == [[0, 5, 0, 0], [0, 7, 8, 9]]
    assert batch.targets.tolist() == [[5, 0, IGNORED, IGNORED], [7, 8, 9, 0]]
    assert batch.real == 6
    torch.manual_seed(0)
    model = DemoLlama(TINY.model)
    alone = [data.collate([document]) for document in (short, long)]
    weighted = sum(model(one.tokens, one.targets) * one.real for one in alone) / batch.real
    torch.testing.assert_close(model(batch.tokens, batch.targets), weighted)


@pytest.mark.parametrize("rows", [1, 3, 4, 9])
def test_documents_that_ranks_share_are_those_of_the_batch(documents: list[str], rows: int) -> None:
    encoded = data.encode(documents, data.train_vocabulary(documents, 320)).training[:rows]
    batch = data.collate(sorted(encoded, key=len))
    own = [ranks.Ranks(rank, 3, rank, 3).deal(batch) for rank in range(3)]
    assert all(min(one.tokens.shape) >= ranks.LEAST for one in own)
    assert sum(int((one.targets != IGNORED).sum()) for one in own) == batch.real
    torch.manual_seed(0)
    model = DemoLlama(TINY.model)
    sums = sum(torch.nn.functional.cross_entropy(model(one.tokens).flatten(0, 1), one.targets.flatten(),
                                                 reduction="sum") for one in own)
    torch.testing.assert_close(sums / batch.real, model(batch.tokens, batch.targets))
    shared = replace(ranks.Ranks(1, 3), part=0, parts=1).deal(batch)
    assert shared.tokens.shape[1] == batch.tokens.shape[1] and shared.tokens.shape[0] == max(rows, 2)


def test_which_part_of_a_batch_a_rank_gives() -> None:
    both = strategy_of(mesh_of(data=2, tensor=2), 4)
    assert [both.part_of_batch(rank) for rank in range(4)] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [strategy_of(word, 2).part_of_batch(1) for word in ("fsdp", "ring", "pp")] == [(1, 2), (0, 1), (0, 1)]


def test_a_strategy_of_the_demo_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(options("--strategy", "auto", "--out", str(tmp_path / "out"))) == 1
    printed = capsys.readouterr().err
    assert all(part in printed for part in ("there is one", "where:", "why:", "torchrun --nproc_per_node=2"))
    assert not (tmp_path / "out").exists()
    for text, words in (("other", "give one of auto, ddp"), ("data=3", "start 3 processes"), ("rows=2", "call axes"),
                        ("data=x", "write, for example")):
        with pytest.raises(ConfigError) as caught:
            ranks.named_strategy(text, 2)
        assert caught.value.where == f"--strategy {text}, 2 processes" and caught.value.why
        assert words in caught.value.do
    assert ranks.named_strategy("auto", 2) is None
    assert str(ranks.named_strategy("data=1,fsdp=2", 2)).startswith("mesh(data=1, fsdp=2)")


def test_the_model_is_causal() -> None:
    torch.manual_seed(0)
    model = DemoLlama(TINY.model)
    tokens = torch.randint(0, 320, (3, 9))
    changed = tokens.clone()
    changed[:, 6:] = 1
    torch.testing.assert_close(model(tokens)[:, :6], model(changed)[:, :6])
    assert not torch.allclose(model(tokens)[:, 6:], model(changed)[:, 6:])


def test_a_seed_fixes_the_run_and_another_changes_it(documents: list[str], tmp_path: Path) -> None:
    first = run_to(documents, 4, tmp_path)
    second = run_to(documents, 4, tmp_path)
    assert first.history.loss == second.history.loss
    assert same_weights(first, second)
    other = run_to(documents, 4, tmp_path, training.start(replace(TINY, seed=4), documents))
    assert other.history.loss != first.history.loss


def test_resume_is_bit_equal(documents: list[str], tmp_path: Path) -> None:
    whole = run_to(documents, 70, tmp_path / "whole")
    run_to(documents, 33, tmp_path / "parts")
    torch.manual_seed(99)  # the checkpoint, not this process, says what the random numbers are
    resumed = resumed_from(tmp_path / "parts", documents)
    assert resumed.step == 33
    run_to(documents, 70, tmp_path / "parts", resumed)
    assert whole.cursor.epoch > 0, "the run must cross an epoch to test the order after it"
    assert resumed.history.loss == whole.history.loss
    assert (resumed.history.rows, resumed.history.length) == (whole.history.rows, whole.history.length)
    assert same_weights(resumed, whole)
    assert sum(whole.history.loss[-10:]) < sum(whole.history.loss[:10])


def test_interrupt_stops_after_the_step_and_keeps_the_checkpoint(documents: list[str], tmp_path: Path) -> None:
    session = training.start(TINY, documents)
    backend = backends.make("eager", session.model, session.optimizer)
    before = signal.getsignal(signal.SIGINT)

    def interrupt(now: training.Session) -> None:
        if now.step == 5:
            signal.raise_signal(signal.SIGINT)

    with training.StopRequest() as stop:
        outcome = training.train(session, backend, 100, tmp_path, 1000, stop, interrupt)
    assert outcome == training.Outcome(False)
    assert signal.getsignal(signal.SIGINT) is before
    resumed = resumed_from(tmp_path, documents)
    assert resumed.step == 5
    assert same_weights(resumed, session)


def test_a_second_interrupt_leaves_the_last_checkpoint(documents: list[str], tmp_path: Path) -> None:
    session = training.start(TINY, documents)
    backend = backends.make("eager", session.model, session.optimizer)

    def interrupt(now: training.Session) -> None:
        if now.step == 5:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), training.StopRequest() as stop:
        training.train(session, backend, 100, tmp_path, 3, stop, interrupt)
    assert training.stored_in(tmp_path)["step"] == 3


def test_a_full_disk_keeps_the_previous_checkpoint(documents: list[str], tmp_path: Path) -> None:
    session = run_to(documents, 2, tmp_path)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))  # the real thing: write() fails half way
        session.step = 3
        backend = backends.make("eager", session.model, session.optimizer)
        with pytest.raises(OutputError, match="the last whole one is step-000000002"):
            session.save(backend, tmp_path)
        outcome = training.train(session, backend, 4, tmp_path, 1000, training.StopRequest(), lambda _: None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert outcome.finished
    assert "could not be written" in outcome.unsaved
    assert resumed_from(tmp_path, documents).step == 2
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000000002"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: next(folder.glob("*.distcp")).write_bytes(b"short"), "cannot be read"),
        (lambda folder: next(folder.glob("*.distcp")).unlink(), "cannot be read"),
        (lambda folder: (folder / ".metadata").write_text("{"), "cannot resume(.|\\n)*is no checkpoint"),
        (lambda folder: (folder / ".metadata").unlink(), "cannot resume(.|\\n)*there is no checkpoint"),
    ],
)
def test_a_broken_checkpoint_is_named(documents: list[str], tmp_path: Path, damage, message: str) -> None:
    run_to(documents, 1, tmp_path)
    damage(tmp_path / "step-000000001")
    with pytest.raises(InputError, match=message):
        resumed_from(tmp_path, documents)


def test_a_checkpoint_of_other_documents_or_of_no_demo_is_refused(documents: list[str], tmp_path: Path) -> None:
    session = run_to(documents, 1, tmp_path)
    with pytest.raises(InputError, match="other documents"):
        resumed_from(tmp_path, documents[:-1])
    with pytest.raises(InputError, match="recipe cannot be read"):
        training.recipe_of({})
    with pytest.raises(InputError, match="history"):
        session.load_state_dict({"step": 1, "cursor": {}})
    backends.make("eager", session.model, session.optimizer).checkpoints.save(tmp_path / "other")
    with pytest.raises(InputError, match=r"cannot resume(.|\n)*has no others\.run"):
        training.stored_in(tmp_path / "other")


def test_eager_against_eager_is_the_same_function(documents: list[str], tmp_path: Path) -> None:
    session = run_to(documents, 1, tmp_path)
    found = compare.compare(session, backends.make("eager", session.model, session.optimizer))
    assert found.loss_difference == 0.0
    assert found.update_difference == 0.0
    assert found.slowest_ratio <= found.ratio <= found.fastest_ratio
    assert found.length == TINY.longest


def test_the_summary_says_what_was_not_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    counters = {"programs": 1, "fallbacks": 0}
    summary = report.Summary("anyshape", 1, 1.0, 1, counters, 2.0, 1.0, 10.0, 5, 0, None, "def x")
    report.print_summary(Console(), summary)
    assert "not compiled" not in capsys.readouterr().out
    report.print_summary(Console(), replace(summary, counters={"programs": 0, "fallbacks": 2}))
    assert "2 programs ran as PyTorch would" in capsys.readouterr().out


def test_a_bad_resume_folder_is_a_clear_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(options("--backend", "eager", "--resume", str(tmp_path / "nowhere"))) == 1
    printed = capsys.readouterr().err
    assert "cannot resume" in printed
    assert "there is no such folder" in printed
    assert "do:" in printed
    assert not (tmp_path / "nowhere").exists()


def test_too_few_documents_is_a_clear_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.py").write_text("def one():\n    return 1\n")
    assert demo.main(options("--backend", "eager", "--documents", str(tmp_path), "--out", str(tmp_path / "out"))) == 1
    assert "too little to train on" in capsys.readouterr().err


def test_the_command_from_start_to_resume(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def tiny(seed: int = 0, tokens: int = 256) -> training.Recipe:
        return replace(TINY, seed=seed, tokens=tokens)

    monkeypatch.setattr("anyshape.tools.demo.command.Recipe", tiny)
    out = folder / "out"
    words = ("--backend", "eager", "--documents", str(folder), "--out", str(out))
    assert demo.main(options(*words, "--steps", "3", "--seed", "3", "--tokens", "256")) == 0
    printed = capsys.readouterr().out
    assert "step    1/3" in printed
    assert "held-out loss" in printed
    assert json.loads((out / "summary.json").read_text())["steps"] == 3
    assert (out / "training.png").read_bytes().startswith(b"\x89PNG")
    assert demo.main(options(*words, "--steps", "4", "--resume")) == 0
    assert "goes on after step 3" in capsys.readouterr().out
    assert demo.main(options(*words, "--seed", "5", "--resume")) == 1
    assert "--seed 5 contradicts the checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("--steps", "0"), ("--tokens", "many"), ("--backend", "xla"), ("--seed", "-1")])
def test_bad_options_are_refused(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options(*words)
    assert words[0] in capsys.readouterr().err


def test_the_peaks_stand_under_a_line_for_the_limit() -> None:
    drawn = chart.peaks([50, 100, 100], [50, 100, 140], 100, "limit 100 B", 40)
    rows = drawn.plain.split("\n")
    assert len(rows) == 1 + chart.HEIGHT and rows[0] == "limit 100 B " + "━" * 7 + "▲━"
    assert [row[12:] for row in rows[1:]] == ["   ██ ██ "] * 4 + ["██ ██ ██ "] * 4
    assert rows[-2].strip().startswith("predicted") and rows[-1].strip().startswith("counted")
    assert any(str(span.style) == chart.LIMIT for span in drawn.spans)
    many = chart.peaks(range(200), range(200), 200, "limit", 40)
    assert all(len(row) <= 40 for row in many.plain.split("\n"))


def test_what_the_allocator_gives_is_counted() -> None:
    with measure.counted_peak(False) as found:
        torch.empty(1000, dtype=torch.uint8)
    assert found == [0]
    before = int(anyshape.stats()["arena_bytes"])
    with measure.counted_peak(True) as found:
        first = torch.empty(1 << 20, dtype=torch.uint8)
        del first
        second = torch.empty(3 << 20, dtype=torch.uint8)
        third = torch.empty(1 << 20, dtype=torch.uint8)
        del second, third
    assert found == [before + (4 << 20)]
    with pytest.raises(ValueError, match="inside"), measure.counted_peak(True) as found:
        raise ValueError("inside")
    with measure.counted_peak(True) as found:  # it can be asked again
        torch.empty(77, dtype=torch.uint8)
    assert found == [before + 77]


@pytest.mark.unguarded
def test_half_of_the_peak_is_kept_and_counted(documents: list[str], tmp_path: Path) -> None:
    recipe = replace(TINY, tokens=1280, model=DemoConfig(vocabulary=320, hidden=64, inner=176, layers=4, heads=4))
    gc.collect()
    anyshape.release()  # arenas of other tests, which would be counted
    session = training.start(recipe, documents)
    bytes_, told = limit.limit_bytes("half", session, 5)
    assert "without a limit the peak" in told and all(p.grad is None for p in session.model.parameters())
    backend = backends.make("anyshape", session.model, session.optimizer, bytes_)
    training.train(session, backend, 5, tmp_path, 1000, training.StopRequest(), lambda _: None)
    history = session.history
    assert max(history.again) > 0
    for i, (predicted, counted) in enumerate(zip(history.predicted, history.counted, strict=True)):
        assert 0 < predicted <= bytes_ and 0.98 * predicted < counted <= bytes_
        assert counted < 1.01 * max(history.predicted[:i + 1])  # a block of an earlier step may be used again
    plain = run_to(documents, 5, tmp_path / "plain", training.start(recipe, documents))
    assert history.loss == pytest.approx(plain.history.loss, rel=1e-4)
    assert plain.history.predicted == plain.history.counted == [0] * 5
    resumed = resumed_from(tmp_path, documents)
    assert resumed.history.counted == history.counted


def test_a_limit_of_the_demo_that_cannot_be(
    documents: list[str], folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--documents", str(folder), "--out", str(folder / "out"))
    assert demo.main(options(*words, "--backend", "eager", "--memory-limit", "half")) == 1
    assert "does not go with --backend eager" in capsys.readouterr().err
    assert demo.main(options(*words, "--memory-limit", "much")) == 1
    assert "a number of bytes" in capsys.readouterr().err
    # one layer: the logits and gradients are most of the peak, and nothing of them can be computed again
    flat = replace(TINY, model=DemoConfig(vocabulary=320, hidden=32, inner=48, layers=1, heads=2))
    with pytest.raises(AnyShapeError, match="cannot run within half") as caught:
        limit.limit_bytes("half", training.start(flat, documents), 3)
    assert "without a limit the peak" in caught.value.why and "set memory_limit to" in caught.value.do
    table = display.status_table(display.Status(1, 1.0, 1.0, 4, 9, 1, 2, 0, 5, display.Peaks(100, [90], [89], 7)))
    assert [column.header for column in table.columns][-4:] == ["predicted", "counted", "limit", "computed again"]
