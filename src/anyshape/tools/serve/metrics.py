"""Counters of a server, as Prometheus reads them: requests, latencies, batches, bytes."""
from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10)
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """What a server counts; each server has its own."""

    def __init__(self) -> None:
        own = self.registry = CollectorRegistry()
        self.requests = Counter("anyshape_requests", "Inference requests that were answered", ("model", "status"),
                                registry=own)
        self.left = Counter("anyshape_requests_left", "Requests whose client left before the answer", ("model",),
                            registry=own)
        self.seconds = Histogram("anyshape_request_seconds", "From the first byte of a request to its answer",
                                 ("model",), buckets=SECONDS, registry=own)
        self.waited = Histogram("anyshape_queue_seconds", "That a request waited for its call", ("model",),
                                buckets=SECONDS, registry=own)
        self.calls = Histogram("anyshape_batch_requests", "Requests that shared a call", ("model",), buckets=COUNTS,
                               registry=own)
        self.queued = Gauge("anyshape_queue_length", "Requests that wait for a call", registry=own)
        self.bytes = Gauge("anyshape_bytes_held", "Bytes of requests and calls", registry=own)

    def text(self) -> bytes:
        """The text form."""
        return generate_latest(self.registry)
