"""One process of an experiment: does a job, tells how far it is, and writes what it found as JSON.

    python -m anyshape_bench.harness.worker MODULE JOB ANSWER

MODULE has `answer(job)`, a dataclass with `error` that is filled, and `measure(job, found, tell)`, which fills it.
"""
from __future__ import annotations

import importlib
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from anyshape.base.errors import AnyShapeError

Tell = Callable[[str, int, int], None]  # what is done, how much of it, of how much


def run(module: Any, job: dict[str, Any], path: Path | None = None) -> dict[str, Any]:
    """Does the job. An error of the model or the backend is recorded: one broken process must not end the run. What is
    known is written to `path` at each step, for one who ends the process."""
    if job.get("threads"):
        torch.set_num_threads(job["threads"])
    found = module.answer(job)

    def write(finished: bool) -> dict[str, Any]:
        answer = asdict(found) | {"finished": finished}
        if path is not None:
            half = path.with_suffix(".half")
            half.write_text(json.dumps(answer))
            half.replace(path)
        return answer

    def tell(event: str, done: int, total: int) -> None:
        print(json.dumps({"event": event, "done": done, "total": total}), flush=True)
        write(False)

    try:
        module.measure(job, found, tell)
    except AnyShapeError as error:
        found.error = str(error)
    except Exception as error:
        traceback.print_exc()
        found.error = f"{type(error).__name__}: {error}"[:2000]
    return write(True)


def main(arguments: list[str]) -> int:
    """Reads the job from the second file and writes what was found to the third."""
    module, job, answer = arguments
    found = run(importlib.import_module(module), json.loads(Path(job).read_text()), Path(answer))
    return 1 if found["error"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
