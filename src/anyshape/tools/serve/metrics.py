"""Counters of a server: requests, latencies, batches, bytes, as Prometheus reads them and as Triton's clients do."""
from __future__ import annotations

from typing import Any

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
                                 ("model", "status"), buckets=SECONDS, registry=own)
        self.waited = Histogram("anyshape_queue_seconds", "That a request waited for its call", ("model",),
                                buckets=SECONDS, registry=own)
        self.calls = Histogram("anyshape_batch_requests", "Requests that shared a call", ("model",), buckets=COUNTS,
                               registry=own)
        self.computed = Histogram("anyshape_call_seconds", "That a call took", ("model",), buckets=SECONDS,
                                  registry=own)
        self.queued = Gauge("anyshape_queue_length", "Requests that wait for a call", registry=own)
        self.bytes = Gauge("anyshape_bytes_held", "Bytes of requests and calls", registry=own)

    def text(self) -> bytes:
        """The text form."""
        return generate_latest(self.registry)

    def statistics(self, model: str) -> dict[str, Any]:
        """What Triton's statistics extension says of a model; `ns` are nanoseconds."""
        def of(histogram: Histogram, right: bool | None = None) -> dict[str, int]:
            ends = {"_count": 0.0, "_sum": 0.0}
            for one in next(iter(histogram.collect())).samples:
                own = one.labels["model"] == model and right in (None, one.labels.get("status") == "200")
                for end in ends:
                    ends[end] += one.value if own and one.name.endswith(end) else 0
            return {"count": int(ends["_count"]), "ns": int(ends["_sum"] * 1e9)}

        success = of(self.seconds, True)
        return {"name": model, "version": "1", "inference_count": success["count"],
                "execution_count": of(self.calls)["count"],
                "inference_stats": {"success": success, "fail": of(self.seconds, False), "queue": of(self.waited),
                                    "compute_infer": of(self.computed)}}
