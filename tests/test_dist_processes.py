"""Train steps over processes of torch.distributed (gloo), against one process."""
from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import anyshape
import forked
from anyshape.base.errors import ConfigError
from anyshape.dist.mesh import mesh_of
from anyshape.dist.placement import Shard
from anyshape.dist.strategies import Strategy, strategy_of
from anyshape.frontend.checkpoint.folder import checkpoints
from anyshape_bench.measure.memory_counter import build_counter
from dist_model import Llama, next_token_loss

WORKER = Path(__file__).parent / "dist_worker.py"
SECONDS = 600  # a hang ends here
PAIR = 2  # programs: a forward and a backward


def ranks(world: int, *arguments: str, torchrun: bool = False, restarts: int = 0) -> list[dict[str, Any]]:
    """What each rank of the worker printed, in order; forked by forked.py, or started by torchrun."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([
        str(Path(anyshape.__file__).parent.parent), str(WORKER.parent), os.environ.get("PYTHONPATH", "")])}
    if torchrun:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        meeting = ["--standalone", f"--max-restarts={restarts}"] if restarts else [f"--master_port={port}"]
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={world}", *meeting, str(WORKER),
                   *arguments]
        if restarts:  # or the ranks that begin again find the addresses of those before in torchrun's store
            environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        ends = [subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)]
    else:
        with tempfile.TemporaryDirectory() as folder:
            ends = forked.run_all(started(world, environment, Path(folder), *arguments), SECONDS)
    for done in ends:
        assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for done in ends for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == world, [done.stdout for done in ends]
    return sorted(found, key=lambda one: one["rank"])


def started(world: int, environment: Mapping[str, str], folder: Path, *arguments: str) -> list[forked.Run]:
    """The ranks of the worker, which meet by a file of the folder."""
    environment = {**environment, "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
                   "DIST_FILE": str(folder / "meeting")}
    return [forked.Run(WORKER, arguments, {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, folder)
            for rank in range(world)]


def check(world: int, mode: str, **more: Any) -> list[dict[str, Any]]:
    found = ranks(world, mode, json.dumps(more))
    for one in found:
        assert one["worst"] < 1e-12, found
        # a forward and a backward for all shapes, and others for batches that gather gradients
        assert one["programs"] == PAIR * (1 + ("accumulate" in more)), found
    return found


@pytest.mark.full
def test_data_parallel_sends_few_messages() -> None:
    for one in check(2, "ddp", clip_norm=1.0):
        assert one["collectives"] * 10 <= one["tensors"] and one["sharded"] == 0


def test_fsdp_keeps_parts_of_weights_and_the_demo_explains_what_it_chose() -> None:
    pytest.importorskip("tokenizers", reason="the demo trains a vocabulary: install anyshape[demo]")
    first, second = ranks(2, "fsdp-and-demo", torchrun=True)
    for one in (first, second):
        assert one["worst"] < 1e-12 and one["programs"] == PAIR
        assert one["sharded"] == one["tensors"]  # what a rank has whole of them reads as NaN
    hears_of_a_failure(first, second)
    keeps_to_a_limit([first["limited"], second["limited"]])  # new steps, over groups that are made anew
    printed = first["demo"]["printed"]
    assert first["demo"]["code"] == second["demo"]["code"] == 0, printed
    assert first["demo"]["worst"] < 1e-4 and first["demo"]["steps"] == 4
    for words in ("found by a search", "blocks.*", "all_", "hidden", "exposed", "also tried", "times as long",
                  "all ranks run mesh(data=2)", "messages a step", "goes on after"):
        assert words in printed, printed
    assert second["demo"]["printed"] == ""


def hears_of_a_failure(first: dict[str, Any], second: dict[str, Any], failing: int = 1) -> None:
    """A step has failed on one rank, whose process went on: the other is told at once, and neither goes on."""
    ends = [first["failed"], second["failed"]]
    (step, again, whole), (own, after, entered) = ends[1 - failing], ends[failing]
    assert step["lines"][0] == f"rank {failing} is lost" and step["seconds"] < 10, ends
    assert step["lines"][2].endswith(f"rank {failing} said: IndexRangeError: {own['lines'][0]}"), ends
    assert again["lines"] == whole["lines"] == step["lines"], ends
    assert after["lines"] == entered["lines"], ends
    assert after["lines"][0] == f"rank {failing} has failed in a step before", ends
    if first["sharded"]:  # nobody has these weights whole
        told_by_the_first([one["parts"]["lines"] for one in (first, second)])


@pytest.mark.full
@pytest.mark.parametrize("mode", ["ddp", "pp"])
def test_who_waits_hears_of_a_step_that_fails_on_another_rank(mode: str) -> None:
    first, second = ranks(2, mode, json.dumps({"fails": True, "steps": 2}))
    hears_of_a_failure(first, second, 0 if mode == "pp" else 1)


def keeps_to_a_limit(found: list[dict[str, Any]], alike: bool = False) -> None:
    """alike: ranks have the same sizes. Else the first one has much more to do, and what it computes again the other
    does not."""
    told_by_the_first([one["lines"] for one in found])
    named = int(found[0]["lines"][3].split("set memory_limit to ")[1].split()[0])
    for one in found:
        assert named == one["named"] == one["least"] and one["changed"] == 0, found
        assert one["worst"] < 1e-5 and one["sent"] == 0, found
    first, second = (one["dropped"] for one in found)
    assert first > 0 and (second > 0) == alike, found


def told_by_the_first(every: list[list[str]]) -> None:
    """Four parts on rank 0, one line elsewhere. every: the lines of each rank's error."""
    first, *others = every
    assert [line.split()[0] for line in first[1:]] == ["where:", "why:", "do:"], every
    assert all(len(one) == 1 and "see rank 0" in one[0] for one in others), every


@pytest.mark.full
@pytest.mark.parametrize("more", [{}, {"clip_norm": 1.0}], ids=str)
@pytest.mark.parametrize("mode", ["ddp", "zero1", "fsdp", "tp"])
def test_all_ranks_keep_to_the_limit_of_each(mode: str, more: dict[str, Any]) -> None:
    keeps_to_a_limit(ranks(2, "limited", mode, json.dumps(more)), alike=mode == "tp")


@pytest.mark.full
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_a_rank_takes_no_more_memory_than_is_predicted(mode: str, tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    library, reason = build_counter(tmp_path)
    if library is None:
        pytest.skip(reason)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    for one in ranks(2, "heap", mode, torchrun=True):
        assert one["messages"] > 1 and one["predicted"] > 4 << 20, one
        # beside its plan, a step has its loss, what gloo notes, and what it adds up in: two pieces of at most 1 MiB
        beside = (64 << 10) + (2 << 20) * (mode == "ddp")
        assert 0.9 * one["predicted"] < one["counted"] <= one["predicted"] + beside, one


@pytest.mark.full
def test_a_search_under_a_limit_leaves_the_last_word_to_the_step() -> None:
    found = ranks(2, "limited_search")
    told_by_the_first([one["lines"] for one in found])
    assert int(found[0]["lines"][3].split("set memory_limit to ")[1].split()[0]) > 10_000, found
    for one in found:
        assert one["worst"] < 1e-5, one
        assert "within the limit of rank" in one["lines"][0] and "fsdp" in one["explained"], one
        assert "alive at the peak" in one["memory"] and "give" not in one["memory"], one


@pytest.mark.full
@pytest.mark.parametrize("mode", ["ddp", "zero1", "fsdp", "tp", "sp", "ulysses", "ring", "pp", "data=1,fsdp=2"])
def test_the_demo_trains_by_every_strategy(mode: str) -> None:
    first, second = ranks(2, "demo", mode, torchrun=True)
    assert first["code"] == second["code"] == 0 and second["printed"] == "", first["printed"]
    assert first["worst"] < 1e-3


@pytest.mark.full
@pytest.mark.parametrize("more", [{}, {"clip_norm": 1.0}, {"accumulate": 2}], ids=str)
@pytest.mark.parametrize("mode", ["ddp", "zero1", "fsdp", "tp", "sp", "ring", "ulysses", "auto"])
def test_every_strategy_on_two_processes(mode: str, more: dict[str, Any]) -> None:
    check(2, mode, **more)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["data-tensor", "data-fsdp", "fsdp-tensor", "zero1", "ring-dp", "ulysses-fsdp"])
def test_strategies_on_four_processes(mode: str) -> None:
    check(4, mode, clip_norm=1.0)


EVERY = ("ddp", "zero1", "fsdp", "tp", "sp", "ring", "ulysses", "pp")
PAIRS = tuple(map("-".join, itertools.combinations(
    ("data", "zero1", "fsdp", "tensor", "sequence", "ring", "ulysses", "pp"), 2)))
SEARCHED = ("searched-context-fsdp", "searched-context-zero1", "searched-sequence-fsdp", "searched-sequence-zero1")


@pytest.mark.full
@pytest.mark.parametrize(("world", "mode"), [
    *((world, mode) for world in (2, 4) for mode in (*EVERY, *SEARCHED)),
    *((4, mode) for mode in PAIRS), (2, "data-tensor")])
def test_twenty_steps_in_float32(world: int, mode: str) -> None:
    for one in ranks(world, mode, json.dumps({"steps": 20, "dtype": "float32"})):
        assert one["worst"] < 1e-5 and (one["programs"] == PAIR or "pp" in mode)


def test_attention_whose_keys_go_around_experts_with_a_hot_replica_and_what_ranks_refuse_together() -> None:
    found = ranks(3, "messages")
    for one in found:
        assert one["ring"]["worst"] < 1e-13 and one["ring"]["cases"] == 14
        assert one["experts"]["worst"] < 1e-12 and one["experts"]["rows"] and one["experts"]["copies"] == 7
    first, second, third = (one["experts"]["lines"] for one in found)
    assert [line.split()[0] for line in second[1:]] == ["where:", "why:", "do:"]  # it had a wrong id
    assert all(len(one) == 1 and "see rank 1" in one[0] for one in (first, third))
    for what in found[0]["refused"]:
        told_by_the_first([one["refused"][what] for one in found])
    why = found[0]["refused"]["models"][2]  # says in what they differ, not how they begin
    assert "layers.1" in why.partition("rank 1 has")[2] and "layers.1" not in why.partition("rank 1 has")[0], why


@pytest.mark.full
def test_a_pipeline_keeps_a_weight_on_one_rank() -> None:
    found = pipeline(2, "pp")
    assert sum(one["sharded"] for one in found) == found[0]["tensors"]  # on the other it reads as NaN


@pytest.mark.full
@pytest.mark.parametrize("more", [{}, {"clip_norm": 1.0}, {"accumulate": 2}], ids=str)
@pytest.mark.parametrize("mode", ["gpipe", "zero-bubble", "interleaved"])
def test_pipelines_on_two_processes(mode: str, more: dict[str, Any]) -> None:
    pipeline(2, mode, **more)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["pp", "zero-bubble", "pp-dp", "pp-zero1", "pp-fsdp", "pp-tp", "pp-ring"])
def test_pipelines_on_four_processes(mode: str) -> None:
    pipeline(4, mode, clip_norm=1.0)


def pipeline(world: int, mode: str, **more: Any) -> list[dict[str, Any]]:
    found = ranks(world, mode, json.dumps(more))
    for one in found:
        assert one["worst"] < 1e-12, found
    return found


@pytest.mark.full
@pytest.mark.parametrize("mode", ["ddp", "zero1", "fsdp", "tp", "sp"])
def test_collectives_beside_compute_change_no_bit(mode: str) -> None:
    for one in ranks(2, "overlapped", mode):
        assert one["differing"] == 0 and one["waited"] > 0


@pytest.mark.full
def test_models_of_images_whose_rows_ranks_do_not_divide() -> None:
    for one in ranks(2, "images"):
        refused = one.pop("convolutions pp")["refused"]  # a batch's statistics
        assert "cannot be a pipeline" in refused and ("BatchNorm" in refused) == (one["rank"] == 0)  # it says why
        for name, found in one.items():
            if name != "rank":
                assert found["worst"] < 1e-12 and found["eager_calls"] == 0, (name, found)
                assert name.endswith("pp") or found["programs"] == PAIR, (name, found)
        assert len(one) == 1 + 7


@pytest.mark.full
def test_ranks_may_have_other_lengths_and_rows() -> None:
    for one in ranks(2, "lengths"):
        assert one["worst"] < 1e-12 and one["programs"] == PAIR


@pytest.mark.full
@pytest.mark.parametrize("mode", ["other_model", "other_code", "other_rows"])
def test_ranks_that_differ_are_found_before_the_first_step(mode: str) -> None:
    first, second = ranks(2, mode)
    told_by_the_first([first["lines"], second["lines"]])
    assert not first.get("changed") and not second.get("changed")


def test_what_is_no_strategy_says_so() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="torchrun"):
        anyshape.train_step(model, lambda model, x: model(x).sum(), torch.optim.SGD(model.parameters()), strategy="ddp")
    two, fixed = mesh_of(data=2), ("layers.*", "data", Shard(0))
    for given in ("other", 3, mesh_of(data=3), mesh_of(rows=2), mesh_of(pp=1, pipe=2), lambda: Strategy(two, ()),
                  lambda: Strategy(two, ("data",)), lambda: Strategy(two, ("ddp", "tp")),
                  lambda: Strategy(two, ("ddp",), (("*", "tensor", Shard(0)),)),
                  lambda: Strategy(two, ("ddp",), (fixed,)).check(["weight", "bias"])):
        with pytest.raises(ConfigError) as caught:
            strategy_of(given() if callable(given) else given, 2)
        assert caught.value.where and caught.value.why and caught.value.do
    Strategy(two, ("zero1",), (fixed, ("state:*", "data", Shard(0)))).check(["layers.0.weight", "bias"])


@pytest.mark.parametrize("modes", [
    "fsdp,zero1", *(pytest.param(f"{first},{first},{second}", marks=pytest.mark.full) for first, second in (
        ("fsdp", "zero1"), ("zero1", "tp"), ("sp", "fsdp"), ("pp", "zero1"),
        *itertools.permutations(("ddp", "fsdp", "tp", "pp"), 2)))])
def test_a_checkpoint_goes_on_bit_by_bit_and_under_another_strategy(modes: str, tmp_path: Path) -> None:
    found = ranks(2, "saved", modes, str(tmp_path))
    for one in found:
        assert one["differing"] == 0 and one["worst"] < 1e-12 and one["count"] == 5, found
    if modes == "fsdp,zero1":  # into one process
        model = Llama(layers=1).double()
        step = anyshape.train_step(model, next_token_loss, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3),
                                   strict=True, threads=1)
        assert step.load(tmp_path) == 3
        for number in (3, 4):
            torch.manual_seed(number)
            step(torch.randint(0, 60, (4, 6 + 5 * number)))
        sums = [float(one.sum()) for one in model.parameters()]
        assert sums == pytest.approx(found[0]["sums"], rel=1e-10)


def test_a_rank_that_is_killed_ends_the_others_with_its_words(tmp_path: Path) -> None:
    first, second = forked.run_all(started(2, os.environ, tmp_path, "loses", "ddp", "killed", str(tmp_path / "run")),
                                    SECONDS)
    assert second.returncode == -signal.SIGKILL and first.returncode == 0, first.stderr[-4000:]
    for lines in json.loads(first.stdout.splitlines()[-1])["lines"]:  # in a step, a function, a save and a load
        assert lines and lines[0] == "rank 1 is lost", lines
        assert [line.split()[0] for line in lines[1:]] == ["where:", "why:", "do:"], lines
    assert [one.name for one in checkpoints(tmp_path / "run")] == ["step-000000001", "step-000000002"]


@pytest.mark.full
def test_torchrun_starts_ranks_again_which_go_on_from_the_checkpoint(tmp_path: Path) -> None:
    for one in ranks(2, "loses", "fsdp", "restarted", str(tmp_path), torchrun=True, restarts=1):
        assert one == {"rank": one["rank"], "count": 4, "begun": 2}
