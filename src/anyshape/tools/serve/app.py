"""The inference server as an ASGI application: routes of the Open Inference Protocol, health, metrics.

    POST /v2/models/NAME/infer    GET /v2/models/NAME    GET /v2/health/live    GET /v2/health/ready    GET /metrics
    GET /v2/models/NAME/stats     GET /v2/models/stats       GET /v2/models/NAME/config    POST /v2/repository/index

The event loop reads requests and writes answers; calls run in the threads of the batcher. Bytes are counted from the
first one of a request to the last one of its answer, and what does not fit into the limit is refused.
"""
from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from anyshape.base.errors import AnyShapeError
from anyshape.base.version import __version__
from anyshape.tools.serve.batching import Batcher, Job, Outcome, status_of
from anyshape.tools.serve.compression import CODINGS, CompressionError, Decompressor
from anyshape.tools.serve.memory import Budget
from anyshape.tools.serve.metrics import Metrics
from anyshape.tools.serve.protocol import HEADER, Array, InferRequest, RequestError, decode, encode
from anyshape.tools.serve.served import Hosted, Servable

JSON_BLOWUP = 24  # bytes of Python's objects for a byte of JSON, at most: "[]," is a list of 56 bytes and its pointer
LARGE = 1 << 16  # bytes of JSON beyond which it is read and written in a thread, so that others are answered meanwhile


@dataclass(frozen=True, slots=True)
class Settings:
    """How a server runs. workers: calls at once; rows: of a shared call; wait: seconds that a request may wait for
    others; patience: seconds in the queue; reading: seconds that a body may take to arrive; limit: bytes, half of them
    for requests and answers, half for calls; largest: bytes of a request."""

    workers: int = 1
    rows: int = 32
    wait: float = 0.0
    patience: float = 30.0
    reading: float = 30.0
    limit: int = 1 << 30
    largest: int = 64 << 20


class Held:
    """The bytes of one request: taken while it is read, given back when it has been answered."""

    def __init__(self, budget: Budget) -> None:
        self.budget, self.bytes = budget, 0

    def take(self, bytes_: int) -> None:
        """More bytes.

        Raises:
            RequestError: they do not fit beside those of others, or never.
        """
        if self.bytes + bytes_ > self.budget.limit:
            raise RequestError(413, "the request and its answer are too large", why=f"they take {self.bytes + bytes_} "
                               f"bytes in memory, {self.budget.limit} are allowed",
                               do="send tensors as bytes, not as JSON, or fewer rows")
        if not self.budget.try_take(bytes_):
            raise RequestError(503, "the server has no memory left for this request",
                               why=f"other requests hold {self.budget.held} of {self.budget.limit} bytes",
                               do="send it again later, or to another server")
        self.bytes += bytes_

    def release(self) -> None:
        """Gives all back."""
        self.budget.give(self.bytes)
        self.bytes = 0


class ClientLeft(Exception):
    """The client has closed its connection: nobody reads an answer."""


class Infer:
    """The endpoint `infer`."""

    def __init__(self, hosted: Hosted, settings: Settings, metrics: Metrics) -> None:
        self.hosted, self.settings, self.metrics = hosted, settings, metrics
        self.requests = Budget(settings.limit // 2)
        self.calls = Budget(settings.limit - settings.limit // 2)
        self.batcher = Batcher(settings.workers, settings.rows, settings.wait, settings.patience, self.calls, metrics)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """See `ASGI`."""
        begin = time.perf_counter()
        held = Held(self.requests)
        request = Request(scope, receive)
        name = request.path_params["model"]
        label = name if name in self.hosted.models else "unknown"
        try:
            try:
                model = self.hosted.take(name_of(self.hosted, request))
                try:
                    response = await self.answer(request, model, held)
                finally:
                    self.hosted.give(model)
            except AnyShapeError as error:
                response = failure(error)
            except (ClientLeft, ClientDisconnect, ConnectionError):
                self.metrics.left.labels(label).inc()
                return
            except Exception as error:  # the border to a stranger's request
                response = failure(RequestError(500, "the request failed", why=f"{type(error).__name__}: "
                                                f"{str(error)[:200]}", do="report it"))
            await _sent(response, scope, receive, send)
            status = str(response.status_code)
            self.metrics.requests.labels(label, status).inc()
            self.metrics.seconds.labels(label, status).observe(time.perf_counter() - begin)
        finally:
            held.release()

    async def answer(self, request: Request, model: Servable, held: Held) -> Response:
        """The response to a request that fits."""
        header, body = await self.read(request, held)
        given = await _nearby(decode, len(body) if header is None else header, memoryview(body), header, model.inputs,
                              model.outputs)
        results = await self.compute(request, model, given, held)
        text = sum(results[number].nbytes for number, binary in given.outputs if not binary)
        parts, length = await _nearby(encode, text, model.name, given, model.outputs, results)
        del results
        headers = {} if length is None else {HEADER: str(length)}
        media = "application/json" if length is None else "application/octet-stream"
        return Response(b"".join(parts), 200, headers, media)

    async def read(self, request: Request, held: Held) -> tuple[int | None, bytes]:
        """Bytes of JSON, and the body, without its compression."""
        coding = request.headers.get("content-encoding", "").strip().lower()
        if coding not in ("", "identity", *CODINGS):
            raise RequestError(415, f"the request is compressed by {coding[:40]}",
                               why="the server reads gzip and deflate",
                               do="send it by one of these, or without Content-Encoding")
        said = request.headers.get(HEADER)
        if said is not None and not (said.isascii() and said.isdigit() and len(said) < 19):
            raise RequestError(400, f"{HEADER} is {said[:40]!r}", why="it is no number of bytes")
        header = None if said is None else int(said)
        largest = self.settings.largest
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > largest:
            raise _too_large(length[:20], largest)
        parts, count = [], 0
        try:
            async with asyncio.timeout(self.settings.reading):
                async for part in _plain(request.stream(), coding in CODINGS):
                    texts = len(part) if header is None else max(0, min(len(part), header - count))
                    held.take(len(part) + texts * JSON_BLOWUP)
                    count += len(part)
                    if count > largest:
                        raise _too_large(count, largest)
                    parts.append(part)
        except CompressionError as error:
            raise RequestError(400, f"the request is not compressed by {coding}", why=str(error),
                               do="send what its Content-Encoding says") from None
        except TimeoutError:
            raise RequestError(408, "the request did not arrive in time", why=f"{count} bytes came within "
                               f"{self.settings.reading:g} s", do="send it faster") from None
        return header, parts[0] if len(parts) == 1 else b"".join(parts)

    async def compute(self, request: Request, model: Servable, given: InferRequest, held: Held) -> list[Array]:
        """What the model makes of a request, when its turn has come.

        Raises:
            ClientLeft: the client did not wait for it.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Outcome] = loop.create_future()

        def done(outcome: Outcome) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(future.set_result, outcome)

        job = Job(model, given.arrays, done)
        self.batcher.submit(job)
        gone: asyncio.Future[None] = asyncio.ensure_future(_left(request))
        try:
            await asyncio.wait((future, gone), return_when=asyncio.FIRST_COMPLETED)
            if not future.done():
                if not self.batcher.leave(job):
                    await future  # its arrays are in use until then
                raise ClientLeft
        finally:
            gone.cancel()
        outcome = future.result()
        if isinstance(outcome, Exception):
            raise outcome if isinstance(outcome, AnyShapeError) else RequestError(
                status_of(outcome), f"the call of {model.name} failed", do="report it",
                why=f"{type(outcome).__name__}: {str(outcome)[:200]}")
        held.take(sum(outcome[number].nbytes * (1 if binary else 1 + JSON_BLOWUP) for number, binary in given.outputs))
        return outcome


async def _sent(response: Response, scope: Any, receive: Any, send: Any) -> None:
    """Sends a response, to the end: its bytes are held until the client has taken nearly all of them."""
    async def in_two(message: Any) -> None:
        if message["type"] == "http.response.body":
            await send(message | {"more_body": True})
            message = {"type": "http.response.body"}
        await send(message)  # waits until there is room for more

    await response(scope, receive, in_two)


def _too_large(bytes_: object, largest: int) -> RequestError:
    return RequestError(413, "the request is too large", why=f"it has {bytes_} bytes or more, {largest} are allowed",
                        do="send fewer rows, or start the server with a larger --largest")


async def _plain(parts: AsyncIterator[bytes], compressed: bool) -> AsyncIterator[bytes]:
    """The parts of a body without compression. Others are answered between its pieces."""
    if not compressed:
        async for part in parts:
            yield part
        return
    decompressor = Decompressor()
    async for part in parts:
        for piece in decompressor.pieces(part):
            yield piece
            await asyncio.sleep(0)
    decompressor.end()


async def _left(request: Request) -> None:
    """Waits until the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _nearby(work: Any, bytes_: int, *arguments: Any) -> Any:
    """Calls `work`, in a thread where there is much of it."""
    return await asyncio.to_thread(work, *arguments) if bytes_ > LARGE else work(*arguments)


def failure(error: AnyShapeError, headers: Mapping[str, str] | None = None) -> Response:
    """The response for an error, in the protocol's form."""
    status = status_of(error)
    own = {"Retry-After": "1"} if status == 503 else {}
    return JSONResponse({"error": str(error)}, status, own | dict(headers or {}))


def name_of(hosted: Hosted, request: Request) -> str:
    """The name of the model in a path."""
    name, version = request.path_params["model"], request.path_params.get("version", "1")
    if name not in hosted.models or version != "1":
        raise RequestError(404, f"there is no model {name[:80]!r} of version {version[:20]}",
                           why=f"the server has version 1 of {', '.join(hosted.models)}", do="name one of these")
    return str(name)


def described(model: Servable) -> dict[str, Any]:
    """A model's metadata."""
    return {"name": model.name, "versions": ["1"], "platform": model.platform,
            "inputs": [one.encode() for one in model.inputs], "outputs": [one.encode() for one in model.outputs]}


def configured(model: Servable) -> dict[str, Any]:
    """A model's configuration, by Triton's extension. Its largest batch is 0, which says that clients send whole
    shapes, the first size too; requests share calls without being asked to."""
    return {"name": model.name, "platform": model.platform, "backend": model.platform, "max_batch_size": 0,
            "input": [one.configured() for one in model.inputs], "output": [one.configured() for one in model.outputs]}


def repository(hosted: Hosted) -> list[Route]:
    """What Triton's model repository extension asks."""
    async def index(_request: Request) -> Response:
        return JSONResponse([{"name": name, "version": "1", "state": "READY", "reason": ""} for name in hosted.models])

    async def controlled(request: Request) -> Response:
        name_of(hosted, request)
        raise RequestError(400, f"{request.url.path[:80]} changes which models the server has",
                           why="it has those of its command line, and clients must not change them",
                           do="send the process SIGHUP to have it read its files again, or start another server")

    return [Route("/v2/repository/index", index, methods=["POST"]),
            *(Route(f"/v2/repository/models/{{model}}/{word}", controlled, methods=["POST"])
              for word in ("load", "unload"))]


def application(hosted: Hosted, settings: Settings) -> Starlette:
    """The application. Its workers end with its lifespan, when all requests have been answered."""
    metrics = Metrics()
    infer = Infer(hosted, settings, metrics)

    async def server(_request: Request) -> Response:
        return JSONResponse({"name": "anyshape", "version": __version__,
                             "extensions": ["binary_tensor_data", "model_configuration", "model_repository",
                                            "statistics"]})

    async def live(_request: Request) -> Response:
        return JSONResponse({"live": True})

    async def ready(_request: Request) -> Response:
        return JSONResponse({"ready": not infer.batcher.closed}, 503 if infer.batcher.closed else 200)

    async def model_ready(request: Request) -> Response:
        return JSONResponse({"name": name_of(hosted, request), "ready": True})

    async def metadata(request: Request) -> Response:
        return JSONResponse(described(hosted.models[name_of(hosted, request)]))

    async def configuration(request: Request) -> Response:
        return JSONResponse(configured(hosted.models[name_of(hosted, request)]))

    async def statistics(request: Request) -> Response:
        names = [name_of(hosted, request)] if "model" in request.path_params else list(hosted.models)
        return JSONResponse({"model_stats": [metrics.statistics(name) for name in names]})

    async def counted(_request: Request) -> Response:
        metrics.bytes.set(infer.requests.held + infer.calls.held)
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def refused(request: Request, error: Exception) -> Response:
        headers = error.headers if isinstance(error, HTTPException) else None  # which methods there are
        if isinstance(error, HTTPException):
            error = RequestError(error.status_code, f"{request.method} {request.url.path[:80]}: {error.detail}",
                                 do="see docs/deploy.md for what the server answers",
                                 why="the server has no such path, or not for this method")
        assert isinstance(error, AnyShapeError)
        return failure(error, headers)

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(infer.batcher.close)

    # they are tried in this order
    routes = [] if "stats" in hosted.models else [Route("/v2/models/stats", statistics)]
    for place in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        routes += [Route(f"{place}/infer", infer, methods=["POST"]), Route(place, metadata),
                   Route(f"{place}/ready", model_ready), Route(f"{place}/config", configuration),
                   Route(f"{place}/stats", statistics)]
    routes += [*repository(hosted), Route("/v2", server), Route("/v2/health/live", live),
               Route("/v2/health/ready", ready), Route("/metrics", counted)]
    return Starlette(routes=routes, lifespan=lifespan,
                     exception_handlers={AnyShapeError: refused, HTTPException: refused})
