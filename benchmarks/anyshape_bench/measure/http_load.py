"""Load of an inference server: clients that each send one request after the other, in one event loop, and the answers.

Latency is from the first byte of a request to the last one of its answer. A client reads whole answers by their
Content-Length, and keeps its connection.
"""
from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)


@dataclass(slots=True)
class Load:
    """What clients saw. seconds: of each answered request; wrong: answers that `right` does not take; errors: what
    ended otherwise. took: seconds of all; busy: of the server's processor time; front: of this, its main thread's."""

    seconds: list[float] = field(default_factory=list)
    wrong: int = 0
    errors: list[str] = field(default_factory=list)
    took: float = 0.0
    busy: float = 0.0
    front: float = 0.0


def run(port: int, requests: Sequence[bytes], order: Sequence[int], clients: int,
        right: Callable[[int, bytes], bool]) -> Load:
    """Sends requests[i] for each i of `order`, `clients` at once. right: is this body the answer to request i?"""
    return asyncio.run(_run(port, requests, order, clients, right))


async def _run(port: int, requests: Sequence[bytes], order: Sequence[int], clients: int,
               right: Callable[[int, bytes], bool]) -> Load:
    load, left = Load(), iter(order)
    answers: list[tuple[int, bytes]] = []

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
        try:
            for number in left:
                begin = time.perf_counter()
                writer.write(requests[number])
                head = await reader.readuntil(b"\r\n\r\n")
                found = LENGTH.search(head)
                body = await reader.readexactly(int(found[1])) if found else b""
                load.seconds.append(time.perf_counter() - begin)
                if head.startswith(b"HTTP/1.1 200"):
                    answers.append((number, body))
                else:
                    load.errors.append(f"{head[:40]!r} {body[:200]!r}")
        except (OSError, EOFError) as error:
            load.errors.append(f"{type(error).__name__}: {error}")
        finally:
            writer.close()

    begin = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    load.took = time.perf_counter() - begin
    load.wrong = sum(not right(number, body) for number, body in answers)
    return load
