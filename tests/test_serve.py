"""`anyshape serve`: requests over HTTP are answered, each with its own results, alone or in a call with others; what
does not fit is refused in words."""
from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import uvicorn
from uvicorn.server import ServerState

import anyshape
from anyshape.artifact.load import load
from anyshape.tools.serve.app import Settings
from anyshape.tools.serve.batching import Batcher, Job
from anyshape.tools.serve.command import address_of, listening_at
from anyshape.tools.serve.compression import PIECE, Decompressor
from anyshape.tools.serve.connections import BoundedProtocol, protocol_of
from anyshape.tools.serve.memory import Budget
from anyshape.tools.serve.metrics import Metrics
from anyshape.tools.serve.protocol import RequestError, TensorSpec, decode, encode
from anyshape.tools.serve.served import Hosted, Rows, Served
from deploying import Encoder, ids, saved
from serving import Client, Doubling, request_of, server

PATH = "/v2/models/double/infer"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return saved(tmp_path_factory.mktemp("served"), Encoder().eval(), ids(3, 7))


@pytest.fixture(scope="module")
def model(file: Path) -> Iterator[Served]:
    with load(file, trust_native=True, threads=1) as run:
        yield Served("encoder", run)


def error_of(status: int, answer: bytes) -> tuple[int, str]:
    """The status and the error, which has its parts."""
    text = json.loads(answer)["error"]
    assert "  why: " in text and "  do: " in text
    return status, text


# --- the protocol


def test_metadata_health_and_metrics(model: Served) -> None:
    with server(model) as (port, _):
        client = Client(port)
        assert json.loads(client.send("GET", "/v2")[1])["extensions"] == [
            "binary_tensor_data", "model_configuration", "model_repository", "statistics"]
        assert json.loads(client.send("GET", "/v2/models/encoder")[1]) == {
            "name": "encoder", "versions": ["1"], "platform": "anyshape",
            "inputs": [{"name": "ids", "datatype": "INT64", "shape": [-1, -1]}],
            "outputs": [{"name": "result", "datatype": "FP32", "shape": [-1, -1, 50]}]}
        assert json.loads(client.send("GET", "/v2/models/encoder/config")[1]) == {
            "name": "encoder", "platform": "anyshape", "backend": "anyshape", "max_batch_size": 0,
            "input": [{"name": "ids", "data_type": "TYPE_INT64", "dims": [-1, -1]}],
            "output": [{"name": "result", "data_type": "TYPE_FP32", "dims": [-1, -1, 50]}]}
        for path in ("health/live", "health/ready", "models/encoder/ready", "models/encoder/versions/1/ready"):
            assert client.send("GET", f"/v2/{path}")[0] == 200
        assert json.loads(client.send("POST", "/v2/repository/index", b"{}")[1]) == [
            {"name": "encoder", "version": "1", "state": "READY", "reason": ""}]
        assert error_of(*client.send("POST", "/v2/repository/models/encoder/unload")[:2])[0] == 400
        for path in ("/v2/models/other", "/v2/models/encoder/versions/2", "/nothing"):
            status, text = error_of(*client.send("GET", path)[:2])
            assert status == 404
        status, answer, said = client.send("GET", "/v2/models/encoder/infer")
        assert error_of(status, answer)[0] == 405 and said["Allow"] == "POST"
        client.infer("encoder", ids=ids(2, 5).numpy())
        text = client.send("GET", "/metrics")[1].decode()
        assert 'anyshape_requests_total{model="encoder",status="200"} 1.0' in text
        assert "anyshape_bytes_held 0.0" in text
        client.send("POST", "/v2/models/encoder/infer", b"{")
        for path in ("stats", "encoder/stats"):
            (own,) = json.loads(client.send("GET", f"/v2/models/{path}")[1])["model_stats"]
            said = own["inference_stats"]
            assert own["name"] == "encoder" and own["inference_count"] == own["execution_count"] == 1
            assert [said[key]["count"] for key in ("success", "fail", "queue", "compute_infer")] == [1] * 4
            assert 0 < said["compute_infer"]["ns"] < said["success"]["ns"]
        client.close()


def test_numbers_and_bytes_give_the_same(model: Served) -> None:
    with server(model) as (port, _):
        client = Client(port)
        for shape in ((3, 7), (1, 2), (2, 33)):  # one row: the program begins at two
            x = ids(*shape).numpy()
            by_bytes = client.infer("encoder", ids=x)["result"]
            by_numbers = client.infer("encoder", binary=False, ids=x)["result"]
            wanted = model.model(np.repeat(x, 2, 0))[:shape[0]] if shape[0] == 1 else model.model(x)
            np.testing.assert_allclose(by_bytes, wanted, rtol=1e-5, atol=1e-7)
            np.testing.assert_array_equal(by_bytes, by_numbers)
        client.close()


SPECS = [TensorSpec("x", "f32", (-1, 2)), TensorSpec("n", "i32", ())]
GOOD = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [[1, 2.5]]},
                   {"name": "n", "datatype": "INT32", "shape": [], "data": 3}]}


def changed(**entries: Any) -> dict[str, Any]:
    """A good request whose first input has other entries; None: it lacks them."""
    first = {key: value for key, value in (GOOD["inputs"][0] | entries).items() if value is not None}
    return {"inputs": [first, GOOD["inputs"][1]]}


def written(given: Any) -> bytes:
    """A request as JSON; bytes in it are JSON already."""
    texts: list[bytes] = []

    def place(one: bytes) -> str:
        texts.append(one)
        return f"text {len(texts) - 1}"

    found = json.dumps(given, default=place).encode()
    for number, text in enumerate(texts):
        found = found.replace(b'"text %d"' % number, text)
    return found


BAD = {
    "no JSON": b"{", "deep": b"[" * 100_000, "a list": b"[]", "no text": b"\xff\xfe", "no inputs": b"{}",
    "inputs that are none": b'{"inputs": [1]}', "one input": {"inputs": GOOD["inputs"][:1]},
    "an input twice": {"inputs": [GOOD["inputs"][0]] * 2}, "an unknown input": changed(name="y"),
    "another datatype": changed(datatype="FP64"), "no datatype": changed(datatype=None),
    "no shape": changed(shape=None), "another rank": changed(shape=[2]),
    "another size": changed(shape=[2, 1]), "a size below 0": changed(shape=[-1, 2]),
    "a size that is true": changed(shape=[True, 2]), "2^64 rows": changed(shape=[2**63, 2]),
    "a float as size": changed(shape=[1.0, 2]), "no data": changed(data=None), "too few numbers": changed(data=[1]),
    "ragged rows": changed(data=[[1], [2, 3]]), "a text": changed(data=["a", "b"]), "null": changed(data=[None, 1]),
    "rows of another shape": changed(data=[[1], [2]]), "a number beyond floats": changed(data=[1e39, 0]),
    "a long number": b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": ['
                     + b"9" * 5000 + b"]}]}",
    "parameters that are none": changed(parameters=5), "bytes that are not there": changed(
        data=None, parameters={"binary_data_size": 8}), "a size of bytes below 0": changed(
        data=None, parameters={"binary_data_size": -8}), "an id that is none": GOOD | {"id": 5},
    "an unknown output": GOOD | {"outputs": [{"name": "z"}]}, "outputs that are none": GOOD | {"outputs": 5},
    "a fraction as a whole number": {"inputs": [GOOD["inputs"][0], GOOD["inputs"][1] | {"data": 1.5}]},
    "an infinite number": changed(data=b"[1e999, 0]"), "NaN": changed(data=b"[NaN, 0]"),
    "Infinity": changed(data=b"[-Infinity, 0]"), "an output without a name of text": GOOD | {"outputs": [{"name": []}]},
    "an output twice": GOOD | {"outputs": [{"name": "x"}, {"name": "x"}]},
    "an extension that is not there": GOOD | {"outputs": [{"name": "x", "parameters": {"classification": 2}}]},
    "a number beyond i32": {"inputs": [GOOD["inputs"][0], GOOD["inputs"][1] | {"data": 2**31}]},
    "bytes of nobody": json.dumps(GOOD).encode() + b" x",
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused(name: str) -> None:
    given = BAD[name]
    body = given if isinstance(given, bytes) else written(given)
    header = len(body) - 1 if name == "bytes of nobody" else None
    with pytest.raises(RequestError) as caught:
        decode(memoryview(body), header, SPECS, SPECS)
    assert caught.value.status == 400 and caught.value.what and caught.value.do and len(str(caught.value)) < 1000
    if name != "an id that is none":
        assert caught.value.why


def test_the_good_one_is_read() -> None:
    found = decode(memoryview(json.dumps(GOOD | {"id": "a"}).encode()), None, SPECS, SPECS)
    np.testing.assert_array_equal(found.arrays[0], np.array([[1, 2.5]], np.float32))
    assert found.arrays[1] == 3 and found.arrays[1].dtype == np.int32
    assert found.id == "a" and list(found.outputs) == [(0, False), (1, False)]


@pytest.mark.parametrize("dtype", ["bool", "u8", "i64", "u64", "f16", "bf16", "f64"])
def test_every_dtype_comes_back(dtype: str) -> None:
    specs = [TensorSpec("x", dtype, (-1,))]
    numbers = [True, False] if dtype == "bool" else [2**63, 1] if dtype == "u64" else [1.5, -2] if dtype[0] in "fb" \
        else [0, 100]
    text = {"inputs": [specs[0].encode() | {"shape": [2], "data": numbers}]}
    given = decode(memoryview(json.dumps(text).encode()), None, specs, specs)
    (answer,), length = encode("m", given, specs, given.arrays)
    assert length is None and json.loads(answer)["outputs"][0]["data"] == numbers
    bytes_ = given.arrays[0].tobytes()
    text = {"inputs": [specs[0].encode() | {"shape": [2], "parameters": {"binary_data_size": len(bytes_)}}],
            "outputs": [{"name": "x", "parameters": {"binary_data": True}}]}
    head = json.dumps(text).encode()
    again = decode(memoryview(head + bytes_), len(head), specs, specs)
    np.testing.assert_array_equal(again.arrays[0], given.arrays[0])
    parts, length = encode("m", again, specs, again.arrays)
    assert parts[1] == bytes_ and length == len(parts[0])


def test_json_has_no_word_for_nan() -> None:
    given = decode(memoryview(json.dumps(GOOD).encode()), None, SPECS, SPECS)
    results = [np.full((1, 2), np.nan, np.float32), np.int32(3)]
    with pytest.raises(RequestError, match="JSON"):
        encode("m", given, SPECS, results)


# --- the queue


def submitted(batcher: Batcher, model: Doubling, *shapes: tuple[int, int], first: float = 1.0) -> list[list[Any]]:
    """Requests of these shapes; where their outcomes will be."""
    found: list[list[Any]] = []
    for shape in shapes:
        found.append([])
        batcher.submit(Job(model, [np.full(shape, first, np.float32)], found[-1].append))
    return found


def batcher_of(**given: Any) -> Batcher:
    usual = {"workers": 1, "rows": 8, "wait": 0.0, "patience": 30.0, "memory": Budget(1000), "metrics": Metrics()}
    return Batcher(**(usual | given))


def test_requests_of_equal_sizes_share_a_call() -> None:
    model, batcher = Doubling(), batcher_of()
    model.gate.clear()
    busy = submitted(batcher, model, (1, 9))
    assert model.running.acquire(timeout=10)
    shapes = ((1, 3), (2, 4), (2, 3), (1, 4), (4, 3), (3, 3))
    outcomes = submitted(batcher, model, *shapes)
    model.gate.set()
    batcher.close()
    assert [one[0][0].shape for one in busy + outcomes] == [(1, 9), *shapes]
    assert all((one[0][0] == 2).all() for one in outcomes)
    assert model.calls == [(1, 9), (7, 3), (3, 4), (3, 3)]  # 7 + 3 rows are more than 8


def test_a_latency_budget_waits_for_others_and_no_longer() -> None:
    model, batcher = Doubling(), batcher_of(wait=0.3, rows=4, workers=2)
    begin = time.monotonic()
    full = submitted(batcher, model, (2, 3), (2, 3))
    assert model.running.acquire(timeout=10) and time.monotonic() - begin < 0.25  # has all rows: goes at once
    lone = submitted(batcher, model, (1, 5))
    assert model.running.acquire(timeout=10) and time.monotonic() - begin > 0.28
    batcher.close()
    assert model.calls == [(4, 3), (1, 5)] and all(full) and all(lone)


def test_nobody_is_overtaken_for_ever() -> None:
    model, batcher = Doubling(), batcher_of(rows=2)
    model.gate.clear()
    submitted(batcher, model, (1, 9))
    assert model.running.acquire(timeout=10)
    submitted(batcher, model, (1, 5), *[(2, 3)] * 3)
    model.gate.set()
    batcher.close()
    assert model.calls == [(1, 9), (1, 5), (2, 3), (2, 3), (2, 3)]


def test_who_shares_no_call_does_not_wait_for_others() -> None:
    model, batcher = Doubling(most=4), batcher_of(wait=20.0)
    lone = submitted(batcher, model, (1, 3), (5, 3))  # five rows are more than the model takes of a batch
    assert model.running.acquire(timeout=10) and not lone[0]
    batcher.close()
    assert model.calls == [(5, 3), (1, 3)]


def test_an_error_is_its_own_requests() -> None:
    model, batcher = Doubling(), batcher_of()
    model.gate.clear()
    submitted(batcher, model, (1, 9))
    assert model.running.acquire(timeout=10)
    good = submitted(batcher, model, (1, 3))
    bad = submitted(batcher, model, (1, 3), first=-1.0)
    more = submitted(batcher, model, (1, 3))
    model.gate.set()
    batcher.close()
    assert isinstance(bad[0][0], ValueError)
    assert (good[0][0][0] == 2).all() and (more[0][0][0] == 2).all()


def test_those_who_leave_or_wait_too_long_are_not_called() -> None:
    model, batcher = Doubling(), batcher_of(patience=0.2)
    model.gate.clear()
    running: list[Any] = []
    batcher.submit(first := Job(model, [np.ones((1, 9), np.float32)], running.append))
    assert model.running.acquire(timeout=10)
    assert not batcher.leave(first)
    left: list[Any] = []
    batcher.submit(job := Job(model, [np.ones((1, 3), np.float32)], left.append))
    late = submitted(batcher, model, (1, 3))
    assert batcher.leave(job) and not batcher.leave(job)
    time.sleep(0.25)
    model.gate.set()
    batcher.close()
    assert not left and model.calls == [(1, 9)] and running
    assert isinstance(late[0][0], RequestError) and late[0][0].status == 503
    with pytest.raises(RequestError, match="ending"):
        submitted(batcher, model, (1, 1))


def test_rows_below_the_least_are_repeated_and_dropped() -> None:
    rows = Rows([0, None], [0, 1], least=3, most=None)
    x, same = np.array([[1.0], [2.0]]), np.zeros(2)
    key, count = rows.key([x, same])
    assert key is not None and count == 2 and rows.key([x, np.zeros(2000)])[0] is None
    joined = rows.joined([[x, same]])
    assert joined[0].tolist() == [[1], [2], [1]] and joined[1] is same
    ((first, second),) = rows.split([joined[0], joined[0].T.repeat(2, 1)], [2])
    assert first.tolist() == [[1], [2]] and second.tolist() == [[1, 1, 2, 2]]


def test_a_model_is_replaced_while_requests_use_it() -> None:
    old, new = Doubling(), Doubling()
    closed: list[Any] = []
    old.close = lambda: closed.append(old)  # type: ignore[method-assign]
    hosted = Hosted({"double": old})
    assert hosted.take("double") is old and hosted.take("double") is old
    hosted.replace(new)  # type: ignore[arg-type]
    hosted.give(old)
    assert hosted.take("double") is new and not closed
    hosted.give(old)
    hosted.give(new)
    assert closed == [old] and not hosted.users[new] and old not in hosted.users
    jobs = [Job(one, [np.ones((1, 3), np.float32)], print) for one in (old, new)]
    assert jobs[0].key != jobs[1].key  # they share no call


# --- the server


def test_memory_is_bounded() -> None:
    model = Doubling(bytes_=600)
    settings = Settings(workers=2, limit=100_000, largest=40_000)
    with server(model, settings=settings) as (port, _):
        client = Client(port)
        for rows, binary, wanted in ((1, True, 200), (5000, True, 413), (2000, False, 413), (1, False, 200)):
            body, headers = request_of(binary, x=np.ones((rows, 2), np.float32))
            status, answer, _ = client.send("POST", PATH, body, headers)
            assert status == wanted and (status == 200 or error_of(status, answer)), (rows, binary, answer)
        model.bytes = 60_000  # a call beyond half of the limit
        assert error_of(*client.send("POST", PATH, *request_of(True, x=np.ones((1, 2), np.float32)))[:2])[0] == 413
        model.bytes = 100
        model.gate.clear()
        while model.running.acquire(blocking=False):
            pass
        body, headers = request_of(True, x=np.ones((2700, 2), np.float32))
        first = Client(port)
        first.connection.request("POST", PATH, body, headers)
        assert model.running.acquire(timeout=10)
        status, answer, said = client.send("POST", PATH, body, headers)
        assert error_of(status, answer)[0] == 503 and said["Retry-After"] == "1"
        model.gate.set()
        assert first.connection.getresponse().status == 200
        first.close()
        client.close()


def test_bodies_that_come_in_pieces_late_or_compressed() -> None:
    with server(Doubling(), settings=Settings(reading=0.3, largest=1000)) as (port, _):
        def status(*parts: bytes) -> bytes:
            with socket.create_connection(("127.0.0.1", port), timeout=20) as plain:
                for part in parts:
                    plain.sendall(part)
                return plain.recv(12)

        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\n".encode()
        body = request_of(False, x=np.ones((1, 1), np.float32))[0]
        pieces = b"".join(b"1\r\n%c\r\n" % one for one in body) + b"0\r\n\r\n"
        assert status(head + b"Transfer-Encoding: chunked\r\n\r\n", pieces) == b"HTTP/1.1 200"
        assert status(head + b"Transfer-Encoding: chunked\r\n\r\n",
                      b"800\r\n" + b" " * 0x800 + b"\r\n0\r\n\r\n") == b"HTTP/1.1 413"
        assert status(head + b"Content-Length: 50\r\n\r\n{") == b"HTTP/1.1 408"
        assert status(head + b"Content-Length: 2\r\nContent-Encoding: gzip\r\n\r\n{}") == b"HTTP/1.1 400"
        assert status(head + b"Content-Length: 2\r\nContent-Encoding: br\r\n\r\n{}") == b"HTTP/1.1 415"
        whole = b"Content-Length: %d\r\nContent-Encoding: Identity\r\n\r\n" % len(body) + body
        assert status(head + whole) == b"HTTP/1.1 200"
        assert status(head + b"Content-Length: 2\r\nInference-Header-Content-Length: x\r\n\r\n{}") == b"HTTP/1.1 400"
        assert status(b"rubbish\r\n\r\n")[9:12] == b"400"
        with socket.create_connection(("127.0.0.1", port), timeout=20) as plain:
            plain.sendall(head + b"Content-Length: 50\r\n\r\n{")  # and leaves
        client = Client(port)
        until = time.monotonic() + 20
        while 'requests_left_total{model="double"} 1.0' not in (said := client.send("GET", "/metrics")[1].decode()):
            assert time.monotonic() < until, said
            time.sleep(0.01)
        assert 'status="500"' not in said
        client.close()


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_compressed_requests_are_read(coding: str, binary: bool) -> None:
    x = np.arange(30_000, dtype=np.float32).reshape(3, -1)  # in several parts and pieces
    body, headers = request_of(binary, x=x)
    small = gzip.compress(body[:40]) + gzip.compress(body[40:]) if coding == "gzip" else zlib.compress(body)
    with server(Doubling()) as (port, _):
        client = Client(port)
        status, answer, _ = client.send("POST", PATH, small, headers | {"Content-Encoding": coding})
        assert status == 200
        assert answer == client.send("POST", PATH, body, headers)[1]
        for wrong in (small[:-9], small + b"rubbish", body):
            status, text = error_of(*client.send("POST", PATH, wrong, headers | {"Content-Encoding": coding})[:2])
            assert status == 400 and "not compressed" in text
        client.close()


def test_what_is_large_when_decompressed_is_refused() -> None:
    bomb = zlib.compress(bytes(50_000_000))
    assert len(bomb) < 50_000
    decompressor = Decompressor()
    assert max(map(len, decompressor.pieces(bomb))) <= PIECE
    with server(Doubling(), settings=Settings(largest=1_000_000)) as (port, _):
        client = Client(port)
        headers = {"Content-Encoding": "deflate"}
        assert error_of(*client.send("POST", PATH, bomb, headers)[:2])[0] == 413
        client.close()
        client = Client(port)
        assert "anyshape_bytes_held 0.0" in client.send("GET", "/metrics")[1].decode()
        client.close()


OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"


@pytest.mark.parametrize("chunked", [False, True])
def test_an_offer_of_another_protocol_is_passed_over(chunked: bool) -> None:
    """Java's client makes it with the first request of a connection."""
    body = request_of(False, x=np.ones((1, 1), np.float32))[0]
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\n".encode()
    length = b"Transfer-Encoding: chunked\r\n\r\n" if chunked else b"Content-Length: %d\r\n\r\n" % len(body)
    sent = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if chunked else body
    get = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n"
    with server(Doubling()) as (port, _):
        for parts in ([head + OFFER + length + sent + get + OFFER + b"\r\n" + head + length + sent],
                      [head + OFFER, length, sent, get, OFFER + b"\r\n", head, length + sent]):
            with socket.create_connection(("127.0.0.1", port), timeout=20) as plain:
                for part in parts:
                    plain.sendall(part)
                    time.sleep(0.01 * (len(parts) > 1))
                found = b""
                while found.count(b"HTTP/1.1 ") < 3 or not found.endswith(b"}"):
                    part = plain.recv(1 << 16)
                    assert part, found
                    found += part
            assert found.count(b"HTTP/1.1 200") == 3 and found.count(b'"data":[2.0]') == 2


def ended(plain: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    found = b""
    try:
        while part := plain.recv(1 << 16):
            found += part
    except ConnectionResetError:
        pass
    return found


def test_clients_that_do_not_go_on_are_dropped() -> None:
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\n".encode()
    large = head + b"Connection: close\r\nContent-Length: 100000\r\n\r\n"
    with server(Doubling(), settings=Settings(reading=0.3, largest=1000)) as (port, _):
        for given, wanted in ((b"", b""), (head, b"HTTP/1.1 408"), (b"\r\n", b""), (large, b"HTTP/1.1 413"),
                              (large + b"{" * 5000, b"HTTP/1.1 413"),
                              (head + b"Connection: close\r\nContent-Length: 9\r\n\r\n{", b"HTTP/1.1 408"),
                              (head + b"x: " + b"y" * 100_000, b"HTTP/1.1 431"),
                              (head + b"x: " + b"y" * 100_000 + b"\r\n\r\n", b"HTTP/1.1 431"),
                              (head + b"x: y\r\n" * 20_000, b"HTTP/1.1 431")):
            with socket.create_connection(("127.0.0.1", port), timeout=20) as plain:
                with contextlib.suppress(ConnectionError):  # it may close while this sends, and the answer is lost
                    plain.sendall(given)
                found = ended(plain)[:12]
                assert found == wanted or (not found and b"431" in wanted), given[:80]


class Wire:
    """What a protocol has of its connection."""

    def __init__(self) -> None:
        self.closed = False

    def get_extra_info(self, _name: str) -> None:
        return None

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def write(self, _data: bytes) -> None:
        pass

    abort, pause_reading, resume_reading = close, is_closing, is_closing


@pytest.mark.parametrize(("parts", "open_"), [
    ((b"POST / HTTP/1.1\r\nContent-Length: 90000\r\n\r\n", b"x" * 90_000, b"GET / HTTP/1.1\r\n\r\n"), True),
    ((b"POST / HTTP/1.1\r\nContent-Length: 90000\r\n\r\n", b"x" * 90_000 + b"GET / HTTP/1.1\r\nx: "), True),
    ((b"GET / HTTP/1.1\r\nx: y\r\n", *[b"z: " + b"z" * 1000 + b"\r\n"] * 60, b"\r\n"), True),
    ((b"GET / HTTP/1.1\r\nx: y\r\n", *[b"z: " + b"z" * 1000 + b"\r\n"] * 70), False),
    ((b"GET / HTTP/1.1\r\nx: " + b"z" * 70_000,), False)])
def test_only_heads_are_counted_as_heads(parts: Sequence[bytes], open_: bool) -> None:
    async def run() -> bool:
        async def app(_scope: Any, _receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body"})  # without reading the body

        config = uvicorn.Config(app, lifespan="off", log_level="error")
        config.load()
        wire, protocol = Wire(), protocol_of(30)(config, ServerState(), {}, asyncio.get_running_loop())
        protocol.connection_made(wire)  # type: ignore[arg-type]
        for part in parts:
            protocol.data_received(part)
            await asyncio.sleep(0.01)
        closed = wire.closed
        protocol.connection_lost(OSError())
        return not closed

    assert asyncio.run(run()) is open_


@pytest.mark.parametrize("lines", ["Content-Length: -1", "Content-Length: 1x", f"Content-Length: {10**23}",
                                   "Content-Length: 5\r\nContent-Length: 6",
                                   "Content-Length: 5\r\nTransfer-Encoding: chunked",
                                   "Transfer-Encoding: chunked\r\n\r\nz"])
def test_lengths_that_are_none_are_refused(lines: str) -> None:
    with server(Doubling()) as (port, _):
        with socket.create_connection(("127.0.0.1", port), timeout=20) as plain:
            head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\n{lines}\r\n\r\n".encode()
            plain.sendall(head + b"5\r\nhello\r\n0\r\n\r\n")
            answer = ended(plain)
            assert answer[9:12] in (b"400", b"413")
            error_of(400, answer.partition(b"\r\n\r\n")[2])
        client = Client(port)
        assert client.infer("double", x=np.ones((1, 2), np.float32))["x"].tolist() == [[2, 2]]
        client.close()


def test_a_body_does_not_wait_until_its_head_is_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    begin = BoundedProtocol.connection_made

    def connection_made(self: BoundedProtocol, transport: Any) -> None:
        begin(self, transport)
        found.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(BoundedProtocol, "connection_made", connection_made)
    with server(Doubling()) as (port, _):
        client = Client(port)
        client.infer("double", x=np.ones((1, 2), np.float32))
        client.close()
    assert found == [1]


def test_an_answer_is_held_until_it_is_read_and_not_for_ever() -> None:
    model = Doubling()
    rows = np.ones((1 << 21, 2), np.float32)  # 16 MB, more than sockets hold
    with server(model, settings=Settings(reading=3.0)) as (port, _):
        client = Client(port)

        def held() -> float:
            return float(client.send("GET", "/metrics")[1].decode().split("anyshape_bytes_held ")[-1].split()[0])

        body, headers = request_of(True, x=rows)
        for reads in (True, False):
            asking = Client(port)
            asking.connection.request("POST", PATH, body, headers)
            assert model.running.acquire(timeout=10)
            time.sleep(0.1)
            assert held() > rows.nbytes
            if reads:
                assert len(asking.connection.getresponse().read()) > rows.nbytes
            deadline = time.monotonic() + 30
            while held():
                assert time.monotonic() < deadline
                time.sleep(0.02)
            asking.close()
        client.close()


def test_it_ends_under_load_without_half_an_answer() -> None:
    model, counts, wrong = Doubling(), [0, 0], []
    x = np.ones((64, 256), np.float32)
    body, headers = request_of(True, x=x)
    with server(model, settings=Settings(workers=2)) as (port, end):
        def client() -> None:
            one = Client(port)
            try:
                while True:
                    one.connection.request("POST", PATH, body, headers)
                    answer = one.connection.getresponse()
                    if answer.status == 503:
                        counts[1] += 1
                        return
                    assert answer.status == 200 and len(answer.read()) > x.nbytes
                    counts[0] += 1
            except ConnectionError:  # closed before the answer began, http.client.RemoteDisconnected
                counts[1] += 1
            except BaseException as error:
                wrong.append(error)
            finally:
                one.close()

        threads = [threading.Thread(target=client) for _ in range(16)]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        end()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
    assert not wrong, wrong[0]
    assert counts[0] and counts[1] == 16 and len(model.calls) <= counts[0] + 16


def test_it_answers_what_runs_before_it_ends() -> None:
    model = Doubling()
    model.gate.clear()
    with server(model) as (port, end):
        clients = [Client(port) for _ in range(3)]
        body, headers = request_of(True, x=np.ones((1, 2), np.float32))
        for client in clients:
            client.connection.request("POST", PATH, body, headers)
        assert model.running.acquire(timeout=10)
        time.sleep(0.1)  # for the other two to have been read
        end()
        time.sleep(0.1)
        model.gate.set()
        assert [client.connection.getresponse().status for client in clients] == [200] * 3
        for client in clients:
            client.close()


def crowd(model: Served, port: int, clients: int, requests: int) -> list[int]:
    """Clients of mixed lengths at once, some of whom leave, send rubbish, or too much; (answered, left, refused)."""
    counts, wrong = [0, 0, 0], []
    lengths = (2, 3, 5, 8, 13, 40)
    wanted = {}
    for number in range(24):
        x = ids(1 + number % 3, lengths[number % len(lengths)]).numpy() * 7 % 50
        wanted[number] = x, model.model(np.concatenate([x, x]))[:len(x)]

    def client(own: int) -> None:
        draw = random.Random(own)
        one = Client(port)
        try:
            for _ in range(requests):
                x, y = wanted[draw.randrange(len(wanted))]
                way = draw.randrange(10)
                if way == 0:
                    body, headers = request_of(True, ids=x)
                    one.connection.request("POST", "/v2/models/encoder/infer", body, headers)
                    one.close()  # without reading the answer
                    counts[1] += 1
                elif way == 1:
                    rubbish = draw.choice((b"{", b"\0" * 100, request_of(True, ids=x + 50)[0], b"x" * 70_000))
                    status, answer, _ = one.send("POST", "/v2/models/encoder/infer", rubbish)
                    assert error_of(status, answer)[0] in (400, 413)
                    counts[2] += 1
                elif way == 2:
                    with pytest.raises(RuntimeError, match=r"400: (.|\n)*out of range"):
                        one.infer("encoder", ids=np.where(np.arange(x.size).reshape(x.shape) == 0, 77, x))
                    counts[2] += 1
                else:
                    found = one.infer("encoder", draw.random() < 0.7, ids=x)["result"]
                    np.testing.assert_allclose(found, y, rtol=1e-5, atol=1e-6)
                    counts[0] += 1
        except BaseException as error:
            wrong.append(error)
        finally:
            one.close()

    threads = [threading.Thread(target=client, args=(i,)) for i in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    assert not wrong, wrong[0]
    return counts


def run_crowd(model: Served, clients: int, requests: int) -> None:
    with server(model, settings=Settings(workers=2, largest=60_000)) as (port, _):
        counts = crowd(model, port, clients, requests)
        assert sum(counts) == clients * requests and all(counts)
        client = Client(port)
        deadline = time.monotonic() + 10
        while b"anyshape_bytes_held 0.0" not in client.send("GET", "/metrics")[1]:  # of those that left
            assert time.monotonic() < deadline
        client.close()


def test_32_clients_get_their_own_results(model: Served) -> None:
    run_crowd(model, 32, 8)


@pytest.mark.full
def test_10000_requests_get_their_own_results(model: Served) -> None:
    run_crowd(model, 32, 320)


def test_the_command_needs_no_torch_and_ends_at_sigterm(file: Path, model: Served) -> None:
    code = ("import sys; sys.modules['torch'] = sys.modules['llvmlite'] = None; "
            "from anyshape.tools.cli import main; sys.exit(main(sys.argv[1:]))")
    command = [sys.executable, "-c", code, "serve", f"encoder={file}", "--port", "0", "--trust-native"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert "share calls" in said, process.stderr.read() if process.stderr and not said else said
        client = Client(int(said.split(":")[3].split("/")[0]))
        x = ids(4, 6).numpy()
        np.testing.assert_allclose(client.infer("encoder", ids=x)["result"], model.model(x), rtol=1e-5, atol=1e-7)
        process.send_signal(signal.SIGHUP)
        assert process.stdout.readline() == "encoder: loaded again\n"
        np.testing.assert_allclose(client.infer("encoder", ids=x)["result"], model.model(x), rtol=1e-5, atol=1e-7)
        process.send_signal(signal.SIGTERM)
        while client.connection.sock is not None:  # until an answer says that the connection closes
            np.testing.assert_allclose(client.infer("encoder", ids=x)["result"], model.model(x), rtol=1e-5, atol=1e-7)
        assert process.wait(20) == 0 and not process.stderr.read()  # type: ignore[union-attr]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("words", "message"), [
    (("--port", "0", "--limit", "much"), "--limit"), (("--rows", "0"), "--rows 0"),
    (("--port", "65536"), "--port 65536"), (("--patience", "nan"), "--patience nan"),
    (("--workers", "-1"), "--workers -1"), (("--latency-budget", "-2"), "--latency-budget -2"),
    (("--drain", "-1"), "--drain -1"),
    (("--host", "256.0.0.1", "--port", "0"), "cannot listen"), (("x={file}", "x={file}"), "two models")])
def test_wrong_options_are_refused(file: Path, words: tuple[str, ...], message: str,
                                   capsys: pytest.CaptureFixture[str]) -> None:
    from anyshape.tools.cli import main
    given = [word.format(file=file) for word in words]
    assert main(["serve", *([] if given[0].startswith("x=") else [str(file)]), "--trust-native", *given]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="without IPv6")
def test_it_listens_by_ipv6() -> None:
    with listening_at("::1", 0) as own, socket.create_connection(own.getsockname()[:2]):
        assert address_of(own) == f"[::1]:{own.getsockname()[1]}"
    for host in ("::1", "127.0.0.1"):
        with listening_at("::", 0) as own, socket.create_connection((host, own.getsockname()[1])):
            pass


def test_what_a_call_takes_is_known_before(model: Served) -> None:
    few, many = (model.bytes_of([ids(2, n).numpy()]) for n in (5, 500))
    assert 0 < few < many and many >= 2 * 500 * 50 * 4
    with pytest.raises(anyshape.AnyShapeError):
        model.bytes_of([ids(2, 5).numpy()[0]])
