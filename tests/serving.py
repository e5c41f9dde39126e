"""Servers for tests, in a thread of this process at a free port, and a plain client of the Open Inference Protocol."""
from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from anyshape.tools.serve.app import Settings
from anyshape.tools.serve.command import server_of
from anyshape.tools.serve.protocol import DATATYPES, TensorSpec
from anyshape.tools.serve.served import Hosted, Rows

WORDS = {np.dtype(name): word for name, word in
         (("int64", "INT64"), ("float32", "FP32"), ("bool", "BOOL"), ("float64", "FP64"), ("int32", "INT32"))}


class Doubling:
    """A model that doubles its rows; `gate` holds its calls up, `calls` has the shapes that it was called with."""

    name, platform = "double", "test"

    def __init__(self, least: int = 0, most: int | None = None, bytes_: int = 100) -> None:
        self.inputs = self.outputs = [TensorSpec("x", "f32", (-1, -1))]
        self.batch = Rows([0], [0], least, most)
        self.gate = threading.Event()
        self.gate.set()
        self.running = threading.Semaphore(0)
        self.calls: list[tuple[int, ...]] = []
        self.bytes = bytes_

    def run(self, arrays: Sequence[Any]) -> list[Any]:
        self.calls.append(arrays[0].shape)
        self.running.release()
        assert self.gate.wait(20)
        if (arrays[0] < 0).any():
            raise ValueError("a number is below 0")
        return [arrays[0] * 2]

    def bytes_of(self, arrays: Sequence[Any]) -> int:
        return self.bytes

    def close(self) -> None:
        pass


@contextlib.contextmanager
def server(*models: Any, settings: Settings = Settings()) -> Iterator[tuple[int, Callable[[], None]]]:
    """The port of a server, and what asks it to end. It has ended afterwards."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=256)
    own = server_of(Hosted({model.name: model for model in models}), settings, 20, "error")
    thread = threading.Thread(target=own.run, kwargs={"sockets": [listening]})
    thread.start()

    def end() -> None:
        own.should_exit = True

    try:
        yield listening.getsockname()[1], end
    finally:
        end()
        thread.join(30)
        assert not thread.is_alive()
        listening.close()


class Client:
    """A client as anybody would write it, by Python's own library."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)

    def close(self) -> None:
        self.connection.close()

    def send(self, method: str, path: str, body: bytes | None = None,
             headers: Mapping[str, str] = {}) -> tuple[int, bytes, Any]:
        self.connection.request(method, path, body, dict(headers))
        answer = self.connection.getresponse()
        return answer.status, answer.read(), answer.headers

    def infer(self, model: str, binary: bool = True, **arrays: Any) -> dict[str, Any]:
        """The results by name.

        Raises:
            RuntimeError: the server's error.
        """
        path = f"/v2/models/{model}/infer"
        body, headers = request_of(binary, **arrays)
        status, answer, said = self.send("POST", path, body, headers)
        if status != 200:
            raise RuntimeError(f"{status}: {json.loads(answer)['error']}")
        length = int(said.get("inference-header-content-length", len(answer)))
        found, at = {}, length
        dtypes = {word: dtype for dtype, word in WORDS.items()}
        for one in json.loads(answer[:length])["outputs"]:
            dtype = dtypes[one["datatype"]]
            if "data" in one:
                array = np.array(one["data"], dtype)
            else:
                size = one["parameters"]["binary_data_size"]
                array = np.frombuffer(answer[at:at + size], dtype)
                at += size
            found[one["name"]] = array.reshape(one["shape"])
        assert at == len(answer)
        return found


def request_of(binary: bool, **arrays: Any) -> tuple[bytes, dict[str, str]]:
    """Body and headers of a request."""
    inputs, parts = [], []
    for name, array in arrays.items():
        entry = {"name": name, "datatype": WORDS[array.dtype], "shape": list(array.shape)}
        if binary:
            parts.append(array.tobytes())
            entry["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            entry["data"] = array.tolist()
        inputs.append(entry)
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": binary}}).encode()
    return b"".join([head, *parts]), {"Inference-Header-Content-Length": str(len(head))} if binary else {}


assert set(WORDS.values()) <= set(DATATYPES.values())
