"""`anyshape serve FILE`: an inference server for deployed files, by the Open Inference Protocol over HTTP."""
from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from anyshape.artifact.load import load
from anyshape.base.errors import AnyShapeError, ConfigError
from anyshape.base.units import bytes_of
from anyshape.tools.named_file import named_file
from anyshape.tools.serve.served import Hosted, Servable, Served, name_of

if TYPE_CHECKING:
    from anyshape.tools.serve.app import Settings

BACKLOG = 2048  # connections that wait to be accepted
# least and most of each option that is a number
NUMBERS = {"port": (0, 65535), "workers": (0, 1024), "threads": (1, 1024), "rows": (1, 1 << 20),
           "latency_budget": (0, 10 ** 6), "patience": (0.001, 10 ** 6), "drain": (0, 10 ** 6)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `main` reads."""
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="a file that anyshape.save wrote, or an ONNX model; NAME=FILE "
                                                 "to name it, otherwise the file's name without .any or .onnx")
    add("--host", default="127.0.0.1", help="address to listen at (default: %(default)s, this machine only)")
    add("--port", type=int, default=8000, help="0: one that is free (default: %(default)s)")
    add("--trust-native", action="store_true", help="run the machine code in the files: for files that come from you")
    add("--workers", type=int, default=0, metavar="N", help="calls at once (default: the cores, by --threads)")
    add("--threads", type=int, default=1, metavar="N", help="threads of a call (default: %(default)s)")
    add("--rows", type=int, default=32, metavar="N",
        help="rows of requests that share a call, at most; 1: none do (default: %(default)s)")
    add("--latency-budget", type=float, default=0.0, metavar="MS",
        help="milliseconds that a request may wait for others of its sizes while a worker is free (default: none)")
    add("--patience", type=float, default=30.0, metavar="S",
        help="seconds that a request may wait for its turn (default: %(default)s)")
    add("--limit", default="1GB", metavar="BYTES",
        help="bytes that requests, answers and calls may hold, weights not counted (default: %(default)s)")
    add("--largest", default="64MB", metavar="BYTES", help="bytes of a request (default: %(default)s)")
    add("--drain", type=int, default=30, metavar="S",
        help="seconds that running requests have after SIGTERM (default: %(default)s)")


def main(arguments: argparse.Namespace) -> int:
    """Runs the command until it is asked to end."""
    from anyshape.tools.serve.app import Settings
    for name, (least, most) in NUMBERS.items():
        value = getattr(arguments, name)
        if not least <= value <= most:  # so is what is no number
            raise ConfigError(f"--{name.replace('_', '-')} {value}", why=f"it is not within {least} and {most}",
                              do=f"pass a number from {least} to {most}")
    cores = len(os.sched_getaffinity(0))
    settings = Settings(arguments.workers or max(1, cores // arguments.threads), arguments.rows,
                        arguments.latency_budget / 1e3, arguments.patience, arguments.patience,
                        bytes_of("--limit", arguments.limit), bytes_of("--largest", arguments.largest))
    files: dict[str, str] = {}
    for word in arguments.files:
        name, path = named_file(word)
        name = name or name_of(path)
        if name in files:
            raise ConfigError(f"two models are called {name}", do="name them: NAME=FILE")
        files[name] = path
    hosted = Hosted({name: _model(name, path, arguments) for name, path in files.items()})
    reloading = threading.Lock()

    def reload() -> None:
        """Replaces the models by what is in their files now, where that can be loaded."""
        with reloading:
            for name, path in files.items():
                try:
                    hosted.replace(_model(name, path, arguments))
                except AnyShapeError as error:
                    print(f"{name}: the file was not loaded again, the model stays as it was: {error}", file=sys.stderr,
                          flush=True)
                else:
                    print(f"{name}: loaded again", flush=True)

    serve(hosted, settings, arguments.host, arguments.port, arguments.drain, reload)
    hosted.close()
    return 0


def _model(name: str, path: str, arguments: argparse.Namespace) -> Servable:
    """A file's model; ONNX models are compiled first, which needs torch."""
    if not path.endswith(".onnx"):
        return Served(name, load(path, arguments.trust_native, arguments.threads))
    from anyshape.tools.serve.onnx_model import served_onnx
    return served_onnx(name, path, arguments.threads)


def serve(hosted: Hosted, settings: Settings, host: str, port: int, drain: int,
          reload: Callable[[], None] = lambda: None) -> None:
    """Answers requests until SIGTERM or SIGINT; what runs then has `drain` seconds. Says a line for each model. At
    SIGHUP it calls `reload` in a thread.

    Raises:
        ConfigError: the address cannot be had.
    """
    listening = listening_at(host, port)
    # uvicorn ends gracefully at either signal, then raises it again, for whoever was there before
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, lambda *_: None)
    signal.signal(signal.SIGHUP, lambda *_: threading.Thread(target=reload, daemon=True).start())
    server = server_of(hosted, settings, drain)
    address = address_of(listening)
    for name, model in hosted.models.items():
        shared = "requests of equal sizes share calls" if model.batch is not None and settings.rows > 1 else \
            "each request is a call of its own"
        print(f"{name}: http://{address}/v2/models/{name}/infer ({shared})", flush=True)
    server.run(sockets=[listening])


def listening_at(host: str, port: int) -> socket.socket:
    """A socket that connections are accepted from; at "::" by IPv6 and IPv4.

    Raises:
        ConfigError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG,
                                    dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6())
    except OSError as error:
        raise ConfigError(f"cannot listen at {host}:{port}", why=str(error),
                          do="pass another --host or --port; 0 takes a free one") from error


def address_of(listening: socket.socket) -> str:
    """A socket's address, as it stands in an URL."""
    host, port = listening.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def server_of(hosted: Hosted, settings: Settings, drain: int, log_level: str = "warning") -> Any:
    """The server, which `run` starts on sockets."""
    import uvicorn

    from anyshape.tools.serve.app import application
    from anyshape.tools.serve.connections import protocol_of
    return uvicorn.Server(uvicorn.Config(
        application(hosted, settings), http=protocol_of(settings.reading), ws="none", log_level=log_level,
        access_log=False, lifespan="on", backlog=BACKLOG, timeout_graceful_shutdown=drain))
