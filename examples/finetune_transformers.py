"""Fine-tunes a Hugging Face causal language model on batches of every length; a train step is one compiled program.

    python examples/finetune_transformers.py                          # a small Llama, less than a minute
    python examples/finetune_transformers.py --model FOLDER --texts notes.txt --memory-limit 2GiB --out notes
    python examples/finetune_transformers.py --out notes --resume     # goes on, bit by bit as it would have

Needs: pip install 'anyshape[demo,bench]'. Nothing is downloaded: by default the model has random weights, and it is
trained on Python's own help pages with a tokenizer made from them.

With accelerate, on one process: `loader = accelerator.prepare(loader)`, and `step(batch)` for each of its batches. The
step takes the plain model and the plain optimiser; there is no `accelerator.backward`.
"""
from __future__ import annotations

import argparse
import csv
import json
import math
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    get_inverse_sqrt_schedule,
)
from transformers.utils.logging import disable_progress_bar

import anyshape
from anyshape.base.errors import OutputError

STOPPED = 130  # what a shell reports for a process that Ctrl-C ended
FIXED = ("model", "texts", "seed", "tokens", "longest", "accumulate", "learning_rate", "warm_up", "clip_norm")
SETTINGS = "settings.json"
COLUMNS = ("step", "loss", "gradient_norm", "learning_rate", "shapes", "tokens_per_second", "held_out_loss")
IGNORED = -100  # the label of padding, for transformers


def arguments(words: list[str] | None, **defaults: object) -> argparse.Namespace:
    """The command line; `defaults` are what a checkpoint says."""
    parser = argparse.ArgumentParser(description="Fine-tune a causal language model of transformers with AnyShape.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--model", help="folder or name of a pretrained model and its tokenizer; without, a small Llama is made")
    add("--texts", help="a file of paragraphs with empty lines between them; without, Python's help pages")
    add("--out", type=Path, default=Path("finetuned"), help="folder for checkpoints and logs")
    add("--resume", action="store_true", help="go on from the newest checkpoint in the --out folder")
    add("--steps", type=int, default=60, help="train up to this step")
    add("--seed", type=int, default=0, help="seed of new weights, of dropout and of the order of the texts")
    add("--tokens", type=int, default=1024, help="most tokens in a batch, padding counted")
    add("--longest", type=int, default=256, help="texts are cut to this many tokens")
    add("--accumulate", type=int, default=1, help="batches whose gradients make one step")
    add("--learning-rate", type=float, default=2e-3, help="highest learning rate, after the warm-up")
    add("--warm-up", type=int, default=10, help="steps until the highest learning rate")
    add("--clip-norm", type=float, default=1.0, help="largest norm of all gradients")
    add("--memory-limit", default=0, help="bytes a batch may take beyond weights and optimiser, such as 40MB; 0: any")
    add("--evaluate-every", type=int, default=20, help="steps between evaluations on held-out texts")
    add("--save-every", type=int, default=20, help="steps between checkpoints")
    add("--keep", type=int, default=1, help="checkpoints that are kept")
    parser.set_defaults(**defaults)
    args = parser.parse_args(words)
    for name in ("steps", "tokens", "longest", "accumulate", "warm_up", "evaluate_every", "save_every", "keep"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return args


# ---- texts and batches


def read_texts(file: str | None) -> list[str]:
    """Paragraphs of `file`, or of the help pages that every Python has."""
    if file is None:
        from pydoc_data.topics import topics

        pages = [topics[name] for name in sorted(topics)]
    else:
        pages = [Path(file).read_text(encoding="utf-8")]
    return [part.strip() for page in pages for part in page.split("\n\n") if len(part.strip()) > 40]


class Batches:
    """An iterable of batches, dicts with input_ids and labels, int64[rows, length]: texts of like length, as many as
    `tokens` allows, so that both sizes change all the time. Endless; it knows where it is, and can go on from there.

    Any other iterable of dicts does as well, such as a `DataLoader` over a dataset of `datasets`.
    """

    def __init__(self, sequences: list[list[int]], padding: int, tokens: int, seed: int) -> None:
        self.sequences, self.padding, self.tokens, self.seed = sequences, padding, tokens, seed
        self.epoch = self.position = 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            packed = self.packed(random.Random(f"{self.seed} {self.epoch}"))
            while self.position < len(packed):
                self.position += 1
                yield self.batch(packed[self.position - 1])
            self.epoch, self.position = self.epoch + 1, 0

    def packed(self, chance: random.Random | None = None) -> list[list[int]]:
        """Numbers of the sequences of each batch, in random order or in order of length."""
        found: list[list[int]] = []
        for number in sorted(range(len(self.sequences)), key=lambda number: len(self.sequences[number])):
            if found and (len(found[-1]) + 1) * len(self.sequences[number]) <= self.tokens:
                found[-1].append(number)
            else:
                found.append([number])
        if chance is not None:
            chance.shuffle(found)
        return found

    def batch(self, numbers: list[int]) -> dict[str, torch.Tensor]:
        """Padded at the right, where causal attention hides it from all real places: no mask is needed."""
        rows = [self.sequences[number] for number in numbers]
        shape = (len(rows), max(map(len, rows)))
        input_ids, labels = torch.full(shape, self.padding), torch.full(shape, IGNORED)
        for place, row in enumerate(rows):
            input_ids[place, :len(row)] = labels[place, :len(row)] = torch.tensor(row)
        return {"input_ids": input_ids, "labels": labels}


def make_model(args: argparse.Namespace, texts: list[str]) -> tuple[torch.nn.Module, PreTrainedTokenizerFast]:
    """A small Llama with random weights, and a byte-pair vocabulary made from the texts."""
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    plain.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=1024, special_tokens=["<end>"], show_progress=False,
                                                         initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<end>", pad_token="<end>")
    torch.manual_seed(args.seed)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=344, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=2048, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )), tokenizer


# ---- what a run keeps


class Run:
    """How far a run has come, as a checkpoint holds it beside model, optimiser and schedule."""

    def __init__(self, args: argparse.Namespace, batches: Batches) -> None:
        self.args, self.batches, self.steps = args, batches, 0

    def state_dict(self) -> dict:
        return {"steps": self.steps, "epoch": self.batches.epoch, "position": self.batches.position}

    def load_state_dict(self, state: dict) -> None:
        self.steps, self.batches.epoch, self.batches.position = state["steps"], state["epoch"], state["position"]


def checkpoints(folder: Path) -> list[Path]:
    """The whole ones in `folder`, oldest first; `TrainStep.save` has written them."""
    return sorted(path.parent for path in folder.glob("step-*/.metadata"))


def keep_settings(args: argparse.Namespace, model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast) -> None:
    """What does not change in a run goes into the --out folder: settings, for --resume, configuration and tokenizer.
    With the model beside it, `from_pretrained` reads the folder."""
    model.config.save_pretrained(args.out)
    model.generation_config.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    (args.out / SETTINGS).write_text(json.dumps({name: getattr(args, name) for name in FIXED}), encoding="utf-8")


# ---- logs


class Log:
    """A line a step, in CSV, and in TensorBoard's format if that is installed; lines after `step` are taken out."""

    def __init__(self, folder: Path, step: int, console: Console) -> None:
        path = folder / "log.csv"
        kept = []
        if step and path.exists():
            with path.open(newline="") as file:
                kept = [row for row in csv.DictReader(file) if int(row["step"]) <= step]
        self.file = path.open("w", newline="", buffering=1)
        self.rows = csv.DictWriter(self.file, COLUMNS)
        self.rows.writeheader()
        self.rows.writerows(kept)
        self.board = None
        try:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        except ImportError:
            console.print("tensorboard is not installed: the log is log.csv alone")

    def write(self, row: dict) -> None:
        self.rows.writerow(row)
        if self.board is not None:
            for name, value in row.items():
                if isinstance(value, float):
                    self.board.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self.file.close()
        if self.board is not None:
            self.board.close()


# ---- training


def loss_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """What is trained: any function of the model and a batch that gives one number."""
    return model(**batch).loss


def held_out_loss(model: torch.nn.Module, fast: torch.nn.Module, batches: Batches) -> float:
    """Mean loss of a token, f64, over texts that are not trained on."""
    total = count = 0.0
    model.eval()
    with torch.no_grad():
        for numbers in batches.packed():
            batch = batches.batch(numbers)
            real = int((batch["labels"][:, 1:] != IGNORED).sum())
            total, count = total + float(fast(**batch).loss) * real, count + real
    model.train()
    return total / count


def train(args: argparse.Namespace, console: Console) -> int:
    """From the first step, or from that of the newest checkpoint, to the end, or to Ctrl-C; gives the exit code."""
    texts = read_texts(args.texts)
    if args.resume:
        tokenizer = AutoTokenizer.from_pretrained(args.out)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.out))
    elif args.model:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(args.model), AutoTokenizer.from_pretrained(args.model)
    else:
        model, tokenizer = make_model(args, texts)
    if not args.resume:
        keep_settings(args, model, tokenizer)
    model.train()
    model.config.use_cache = False
    end = tokenizer.eos_token_id
    sequences = [row[:args.longest - 1] + [end] for row in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    if len(sequences) < 20:
        raise ValueError(f"there are only {len(sequences)} paragraphs to train on; 20 are the least")
    held_out = Batches(sequences[::20], end, args.tokens, args.seed)
    batches = Batches([row for i, row in enumerate(sequences) if i % 20], end, args.tokens, args.seed)

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.05)
    # it does not know the last step: a run that --resume makes longer equals one that was long from the start
    schedule = get_inverse_sqrt_schedule(optimizer, args.warm_up)
    step = anyshape.train_step(model, loss_of, optimizer, clip_norm=args.clip_norm, accumulate=args.accumulate,
                               memory_limit=args.memory_limit)
    fast = anyshape.compile(model)
    torch.manual_seed(args.seed)
    run = Run(args, batches)
    if args.resume:
        step.load(args.out, schedule=schedule, run=run)
    done = run.steps

    def checkpoint() -> str:
        """Writes one; why it could not be, or nothing."""
        run.steps = done
        try:
            step.save(args.out, keep=args.keep, schedule=schedule, run=run)
        except OutputError as error:
            console.print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
            return str(error)
        return ""

    asked: list[int] = []  # the numbers of signals: the step in hand is finished first

    def ask(number: int, frame: object) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        console.print("stopping after this step; Ctrl-C again stops at once")

    stream, unsaved, saved = iter(batches), "", done
    log = Log(args.out, done, console)
    before = signal.signal(signal.SIGINT, ask)
    bar = Progress(TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn(),
                   TimeRemainingColumn(), console=console, disable=not console.is_terminal)
    console.print(f"{len(batches.sequences)} texts, {sum(weight.numel() for weight in model.parameters()) / 1e6:.1f} "
                  f"million weights, steps {done + 1} to {args.steps}; the first one compiles", highlight=False)
    try:
        with bar:
            task = bar.add_task("training", total=args.steps, completed=done)
            while done < args.steps and not asked:
                begin = time.perf_counter()
                taken = [next(stream) for _ in range(args.accumulate)]
                losses = [float(step(batch)) for batch in taken]
                row = {"step": done + 1, "loss": sum(losses) / len(losses), "gradient_norm": float(step.norm),
                       "learning_rate": schedule.get_last_lr()[0],
                       "shapes": " ".join(f"{rows}x{length}" for rows, length in (b["labels"].shape for b in taken)),
                       "tokens_per_second": sum(b["labels"].numel() for b in taken) / (time.perf_counter() - begin)}
                if not math.isfinite(row["loss"]):
                    raise ValueError(f"the loss of step {done + 1} is {row['loss']}; a lower --learning-rate may help")
                schedule.step()
                done += 1
                if done % args.evaluate_every == 0 or done == args.steps:
                    row["held_out_loss"] = held_out_loss(model, fast, held_out)
                    console.print(f"step {done}: loss {row['loss']:.3f}, held-out loss {row['held_out_loss']:.3f}, "
                                  f"{row['tokens_per_second']:,.0f} tokens/s", highlight=False)
                log.write(row)
                bar.update(task, completed=done, description=f"loss {row['loss']:.3f}")
                if done % args.save_every == 0:
                    unsaved, saved = checkpoint(), done  # if not: the next one may find room
            if saved != done or unsaved:
                unsaved = checkpoint()
        if not unsaved:
            anyshape.consolidate(args.out, args.out / "model.safetensors")
    finally:
        signal.signal(signal.SIGINT, before)
        log.close()
    if done < args.steps:
        console.print(f"stopped after step {done}; go on with --resume --out {args.out}", highlight=False)
        return STOPPED
    console.print(f"{len(step.programs)} programs served all shapes; the model, its tokenizer and log.csv are in "
                  f"{args.out}", highlight=False, soft_wrap=True)
    return 1 if unsaved else 0


def main(words: list[str] | None = None) -> int:
    """Runs the command; gives the exit code."""
    args, console = arguments(words), Console()
    disable_progress_bar()  # one bar is enough
    try:
        found = checkpoints(args.out)
        if args.resume:
            if not found:
                raise ValueError(f"{args.out} has no checkpoint\n  do:  leave --resume out, or give its --out folder")
            settings = json.loads((args.out / SETTINGS).read_text(encoding="utf-8"))
            args = arguments(words, **settings)
            for name, value in settings.items():
                if getattr(args, name) != value:
                    raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} contradicts the checkpoint, "
                                     f"which has {value}\n  do:  leave it out, or begin anew in another --out folder")
        elif found:
            raise ValueError(f"{args.out} has checkpoints of an earlier run\n"
                             "  do:  go on with --resume, or give another --out folder")
        args.out.mkdir(parents=True, exist_ok=True)
        return train(args, console)
    except KeyboardInterrupt:
        print("stopped at once; a checkpoint that was written before is whole", file=sys.stderr)
        return STOPPED
    except (OSError, ValueError, anyshape.AnyShapeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
