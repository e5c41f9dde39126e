"""CUDA graphs (HIP graphs) of a program at given sizes: its launches, and the products that PyTorch's libraries do,
recorded once by stream capture, then issued by one call of the driver.

    launch a, matmul b, launch c, copy the status  -->  after k calls: captured;  then: launch the graph

A graph holds the addresses of its launches, so it stands for calls with just these: inputs, results, both blocks of
the arena, scratch and status. A call with others is issued launch by launch. So no memory is copied in, and no
allocation has to stay where it is; where PyTorch's caching allocator gives a step the same blocks again, as in a
training with few shapes, its graphs are found again.

Libraries take workspaces, which are those of the stream on which all graphs are captured: such graphs run one after
another, whatever their streams. A graph that cannot be made is told once, and calls go on launch by launch.
"""
from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable

from anyshape.backend.triton.streams import DeviceStreams
from anyshape.base.errors import DeviceError

MOST_GRAPHS, MOST_COUNTED = 4, 64  # addresses of which a program keeps graphs, and counts calls
RELAXED = 2  # mode of a capture: other calls of the driver, of this thread too, are no part of it


class DeviceGraph:
    """An instantiated graph; given back when nobody has it any more: the driver lets it end first."""

    __slots__ = ("handle", "libraries", "streams")

    def __init__(self, streams: DeviceStreams, handle: int, libraries: bool) -> None:
        self.streams = streams
        self.handle = handle
        self.libraries = libraries

    def launch(self, stream: int) -> None:
        """Puts its work on a stream.

        Raises:
            DeviceError: the driver refuses it.
        """
        if not self.libraries:
            self._launch(stream)
            return
        streams = self.streams
        with streams.capturing:
            if streams.last is not None and streams.last[0] != stream:
                streams.wait(stream, streams.last[1])
            self._launch(stream)
            streams.last = stream, streams.mark(stream)

    def _launch(self, stream: int) -> None:
        try:
            with self.streams.driver.current(self.streams.device):
                self.streams.driver.call("launch_graph", self.handle, stream)
        except DeviceError as error:
            error.reached = -1
            raise

    def __del__(self) -> None:
        self.streams.driver.free("destroy_graph_exec", self.handle)


class StreamGraphs:
    """The graphs of one program. Thread-safe.

    Args:
        after: calls with the same addresses before there is a graph of them, at least 1.
        libraries: some of the work is that of PyTorch's libraries.
        name: the program's.
    """

    def __init__(self, streams: DeviceStreams, after: int, libraries: bool = False, name: str = "") -> None:
        self.streams = streams
        self.after = after
        self.libraries = libraries
        self.name = name
        self.refused = False
        self._graphs: dict[bytes, DeviceGraph] = {}
        self._calls: Counter[bytes] = Counter()
        self._lock = threading.Lock()

    def find(self, key: bytes, issue: Callable[[int], bool]) -> DeviceGraph | None:
        """The graph of calls with the addresses `key`, which is made when it is due; None: there is none yet.

        Args:
            issue: puts the program's work on a stream; whether it did.
        """
        if self.refused:
            return None
        with self._lock:
            found = self._graphs.pop(key, None)
            if found is None:
                if len(self._calls) >= MOST_COUNTED and key not in self._calls:
                    self._calls.clear()
                self._calls[key] += 1
                if self._calls[key] <= self.after:
                    return None
                found = self._tried(issue)
                if found is None:
                    self.refused = True
                    return None
                del self._calls[key]
                while len(self._graphs) >= MOST_GRAPHS:
                    del self._graphs[next(iter(self._graphs))]
            self._graphs[key] = found  # the last one used
            return found

    def _tried(self, issue: Callable[[int], bool]) -> DeviceGraph | None:
        why = "a step of it cannot be captured"
        try:
            found = self._captured(issue)
        except DeviceError as error:
            found, why = None, f"{error.where}: {error.why}"
        if found is None:
            told = DeviceError(f"there is no graph of {self.name}", why=why,
                               do="leave device_graphs out: its calls are issued launch by launch")
            warnings.warn(str(told), RuntimeWarning, stacklevel=1)
        return found

    def _captured(self, issue: Callable[[int], bool]) -> DeviceGraph | None:
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
                return DeviceGraph(streams, streams.driver.graph(graph), self.libraries) if done else None
            finally:
                streams.driver.free("destroy_graph", graph)
