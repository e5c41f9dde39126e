"""The demo's documents and batches: functions and classes of Python's own library, packed by a budget of tokens.

Every machine that can run the demo has this text, its lengths vary by a factor of fifty, and nothing is downloaded.
A batch holds documents of similar length, as many as the budget allows, so both of its sizes change at every step:

    budget 2048:   4 x 500    31 x 66    12 x 170    85 x 24   ...
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from anyshape.tools.demo.model import IGNORED

END_TEXT = "<end>"
END = 0  # the number of `<end>`, which opens and closes every document and fills padded places

# Tests, tables and what a distribution may leave out or add: without them the text is alike on most machines.
SKIPPED_FOLDERS = frozenset(
    ("test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "encodings", "turtledemo", "ensurepip")
)
LONGEST_CLASS = 60  # lines; a longer class is given as its methods
SHORTEST = 80  # characters; below it there is nothing to learn
HELD_OUT_EVERY = 40
POOL = 1024  # documents sorted by length together: little padding, and still a random order


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokenised documents, each int32[n] with `END` at both ends; `fingerprint` names the text and the vocabulary."""

    training: tuple[np.ndarray, ...]
    held_out: tuple[np.ndarray, ...]
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Batch:
    """tokens, targets: int64[rows, length]; `real` counts the targets that are not padding."""

    tokens: torch.Tensor
    targets: torch.Tensor
    real: int


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in the endless row of batches: the whole state of the data order."""

    epoch: int = 0
    position: int = 0


def library_files(folder: Path) -> list[Path]:
    """The Python files of a library folder, in an order that does not depend on the file system."""
    found = []
    for path in folder.rglob("*.py"):
        relative = path.relative_to(folder)
        if not SKIPPED_FOLDERS.intersection(relative.parts):
            found.append(relative)
    return [folder / relative for relative in sorted(found, key=lambda path: path.parts)]


def documents_of(source: str) -> Iterator[str]:
    """Functions and classes of one file as texts of their own; a long class is given as its methods."""
    lines = source.splitlines(keepends=True)

    def text(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        return textwrap.dedent("".join(lines[first - 1 : node.end_lineno]))

    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield text(node)
        elif isinstance(node, ast.ClassDef):
            if (node.end_lineno or 0) - node.lineno < LONGEST_CLASS:
                yield text(node)
                continue
            for member in node.body:
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    yield text(member)


def read_documents(folder: Path | None = None) -> list[str]:
    """Every document of the standard library (or of another folder), without repeats, in a fixed order."""
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    documents: dict[str, None] = {}
    for path in library_files(folder):
        try:
            found = list(documents_of(path.read_text(encoding="utf-8")))
        except (SyntaxError, UnicodeDecodeError):
            continue  # a file for another version of Python, or a test of broken encodings
        documents.update((document, None) for document in found if len(document) >= SHORTEST)
    return list(documents)


def train_vocabulary(documents: Sequence[str], size: int) -> Tokenizer:
    """Byte-level byte-pair vocabulary (Sennrich et al. 2016) of `size` entries; `<end>` is number 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def encode(documents: Sequence[str], tokenizer: Tokenizer) -> Corpus:
    """Turn texts into token numbers and set one document in `HELD_OUT_EVERY` aside."""
    digest = hashlib.sha256(tokenizer.to_str().encode())
    encoded = []
    for begin in range(0, len(documents), POOL):  # in parts: an encoding takes far more memory than its numbers
        part = list(documents[begin : begin + POOL])
        for document, encoding in zip(part, tokenizer.encode_batch_fast(part), strict=True):
            digest.update(document.encode(errors="surrogatepass"))
            encoded.append(np.array([END, *encoding.ids, END], dtype=np.int32))
    held_out = tuple(encoded[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])
    training = tuple(item for index, item in enumerate(encoded) if (index + 1) % HELD_OUT_EVERY)
    return Corpus(training, held_out, digest.hexdigest())


def pack(lengths: Sequence[int], budget: int, order: np.ndarray) -> list[tuple[int, ...]]:
    """Cut `order` into pools, sort each by length, and fill batches with `rows * longest <= budget`."""
    batches = []
    for start in range(0, len(order), POOL):
        pool = sorted((int(index) for index in order[start : start + POOL]), key=lambda index: (lengths[index], index))
        batch: list[int] = []
        for index in pool:
            if batch and (len(batch) + 1) * lengths[index] > budget:
                batches.append(tuple(batch))
                batch = []
            batch.append(index)
        if batch:
            batches.append(tuple(batch))
    return batches


def collate(documents: Sequence[np.ndarray]) -> Batch:
    """Pad documents at the right to the longest; the target of a place is the token after it."""
    length = max(len(document) for document in documents) - 1
    tokens = np.full((len(documents), length), END, dtype=np.int64)
    targets = np.full((len(documents), length), IGNORED, dtype=np.int64)
    for row, document in enumerate(documents):
        tokens[row, : len(document) - 1] = document[:-1]
        targets[row, : len(document) - 1] = document[1:]
    return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), int((targets != IGNORED).sum()))


class BatchStream:
    """The endless row of training batches; a pure function of documents, budget, longest and seed.

    budget: most places (rows times length, padding counted) in a batch. longest: documents are cut to this length.
    device: where the batches are.
    """

    def __init__(self, documents: Sequence[np.ndarray], budget: int, longest: int, seed: int,
                 device: torch.device | str = "cpu") -> None:
        if not documents:
            raise ValueError("no documents to make batches of")
        longest = min(longest, budget)
        self._documents = [document[: longest + 1] for document in documents]
        self._lengths = [len(document) - 1 for document in self._documents]
        self._budget = budget
        self._seed = seed
        self._device = device
        self._epoch = lru_cache(maxsize=1)(self._pack_epoch)

    def _pack_epoch(self, epoch: int) -> list[tuple[int, ...]]:
        generator = np.random.default_rng((self._seed, epoch))
        batches = pack(self._lengths, self._budget, generator.permutation(len(self._documents)))
        return [batches[index] for index in generator.permutation(len(batches))]

    def take(self, cursor: Cursor) -> tuple[Batch, Cursor]:
        """The batch at a place and the place after it."""
        batches = self._epoch(cursor.epoch)
        batch = collate([self._documents[index] for index in batches[cursor.position]])
        batch = replace(batch, tokens=batch.tokens.to(self._device), targets=batch.targets.to(self._device))
        following = cursor.position + 1
        if following < len(batches):
            return batch, Cursor(cursor.epoch, following)
        return batch, Cursor(cursor.epoch + 1, 0)

    def first(self, count: int) -> list[Batch]:
        """The first `count` batches of the row."""
        batches = []
        cursor = Cursor()
        for _ in range(count):
            batch, cursor = self.take(cursor)
            batches.append(batch)
        return batches
