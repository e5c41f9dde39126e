"""`anyshape opt FILE`: runs passes over the text form of a graph and prints what comes out."""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

from anyshape.base.config import Config
from anyshape.base.errors import ConfigError
from anyshape.base.files import read_text
from anyshape.compiler.driver import compile_graph
from anyshape.compiler.stages import check_names
from anyshape.ir.parse import parse
from anyshape.ir.pass_manager import History
from anyshape.ir.show import show
from anyshape.ir.verify import verify
from anyshape.kernel.loop_ir.show import show as show_kernel
from anyshape.passes.driver import pipeline
from anyshape.plan.ir.show import show as show_plan

AFTER = ("kernels", "plan")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `main` reads."""
    names = ", ".join(dict.fromkeys(step.__name__ for step in pipeline.ROAD))
    parser.add_argument("file", help="the text form of a graph, such as dump= writes; - reads standard input")
    parser.add_argument("--passes", default=None, metavar="A,B", help=f"of {names} (default: all, in that order)")
    parser.add_argument("--every", action="store_true", help="print the graph after each pass that changed it")
    parser.add_argument("--to", choices=AFTER, default=None, help="go on to the kernels or the plan, and print those")


def main(arguments: argparse.Namespace) -> int:
    """Runs the command.

    Raises:
        ConfigError: no such file or pass. ParseError: the file holds no graph. VerifyError: a rule is broken.
    """
    text = sys.stdin.read() if arguments.file == "-" else read_text(Path(arguments.file), "give a file with a graph")
    graph = parse(text)
    verify(graph, "reading")
    if arguments.to is not None:
        compiled = compile_graph(graph, Config.make())
        if arguments.to == "plan":
            print(show_plan(compiled.plan), end="")
        else:
            print("\n\n".join(show_kernel(program) for program in compiled.programs.values()))
        return 0
    history = History()
    config = Config.make(check=1)
    check_names(config)
    result = pipeline.run(_passes(arguments.passes), graph, config, history)
    if arguments.every:
        before = show(graph)
        for stage in history.stages:
            after = show(stage.ir)
            print(f"# {stage.name}: {'no change' if after == before else f'{stage.before} -> {stage.after} equations'}")
            print(after if after != before else "", end="")
            before = after
    else:
        print(show(result), end="")
    return 0


def _passes(names: str | None) -> list[pipeline.Pass]:
    known = {step.__name__: step for step in pipeline.ROAD}
    if names is None:
        return list(pipeline.ROAD)
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ConfigError(f"there is no pass {', '.join(unknown)}", why=f"the passes are {', '.join(known)}",
                          do="correct the name")
    return [known[name] for name in wanted]
