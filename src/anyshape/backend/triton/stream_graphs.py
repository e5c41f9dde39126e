"""CUDA graphs (HIP graphs) of a program at given sizes: its launches, recorded once by stream capture, then issued
by one call of the driver.

    launch a, launch b, copy the status  -->  after k calls: captured;  then: launch the graph

A graph holds the addresses of its launches, so it stands for calls with just these: inputs, results, both blocks of
the arena, scratch and status. A call with others is issued launch by launch. So no memory is copied in, and no
allocation has to stay where it is; where PyTorch's caching allocator gives a step the same blocks again, as in a
training with few shapes, its graphs are found again.
"""
from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from anyshape.backend.triton.streams import DeviceStreams

MOST_GRAPHS, MOST_COUNTED = 4, 64  # addresses of which a program keeps graphs, and counts calls
RELAXED = 2  # mode of a capture: other calls of the driver, of this thread too, are no part of it


class Graph:
    """An instantiated graph; given back when nobody has it any more: the driver lets it end first."""

    __slots__ = ("handle", "streams")

    def __init__(self, streams: DeviceStreams, handle: int) -> None:
        self.streams = streams
        self.handle = handle

    def launch(self, stream: int) -> None:
        """Puts its work on a stream.

        Raises:
            DeviceError: the driver refuses it.
        """
        with self.streams.driver.current(self.streams.device):
            self.streams.driver.call("launch_graph", self.handle, stream)

    def __del__(self) -> None:
        self.streams.driver.free("destroy_graph_exec", self.handle)


class StreamGraphs:
    """The graphs of one program. Thread-safe.

    Args:
        after: calls with the same addresses before there is a graph of them, at least 1.
    """

    def __init__(self, streams: DeviceStreams, after: int) -> None:
        self.streams = streams
        self.after = after
        self._graphs: dict[bytes, Graph] = {}
        self._calls: Counter[bytes] = Counter()
        self._lock = threading.Lock()

    def find(self, key: bytes, issue: Callable[[int], bool]) -> Graph | None:
        """The graph of calls with the addresses `key`, which is made when it is due; None: there is none yet.

        Args:
            issue: puts the program's work on a stream; whether it did.
        """
        with self._lock:
            found = self._graphs.pop(key, None)
            if found is None:
                if len(self._calls) >= MOST_COUNTED and key not in self._calls:
                    self._calls.clear()
                self._calls[key] += 1
                if self._calls[key] <= self.after:
                    return None
                found = self._captured(issue)
                if found is None:
                    return None
                del self._calls[key]
                while len(self._graphs) >= MOST_GRAPHS:
                    del self._graphs[next(iter(self._graphs))]
            self._graphs[key] = found  # the last one used
            return found

    def _captured(self, issue: Callable[[int], bool]) -> Graph | None:
        streams = self.streams
        with streams.capturing, streams.driver.current(streams.device):
            stream = streams.side("capture")
            streams.driver.call("begin_capture", stream, RELAXED)
            graph, done = 0, False
            try:
                done = issue(stream)
            finally:
                graph = streams.driver.end_capture(stream)
            try:
                return Graph(streams, streams.driver.graph(graph)) if done else None
            finally:
                streams.driver.free("destroy_graph", graph)
