"""What `/metrics` tells: latencies as the server saw them, and the engine's own counts."""

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest

from headrace.engine.core.totals import Totals
from headrace.engine.result import Result
from headrace.server.engine_metrics import EngineMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_REQUEST = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
_FINISHED = {"stop": "stop", "length": "length", "cancelled": "abort", "deadline": "abort"}


class Metrics:
    """Owns the registry. Called from the event loop only."""

    def __init__(self, model_name: str) -> None:
        disable_created_metrics()  # dashboards read none of them
        self._registry = CollectorRegistry()
        self._name = model_name
        self._ttft = self._histogram("time_to_first_token", "from submission to the first token", _TTFT)
        self._between = self._histogram("inter_token_latency", "between two tokens of an answer", _BETWEEN)
        self._whole = self._histogram("e2e_request_latency", "from submission to the last token", _REQUEST)
        self._queue = self._histogram("request_queue_time", "from submission to the first step", _REQUEST)
        self._prefill = self._histogram("request_prefill_time", "from the first step to the first token", _REQUEST)
        self._decode = self._histogram("request_decode_time", "from the first token to the last", _REQUEST)
        self._success = Counter(
            "vllm:request_success",
            "Answers that ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._refused = Counter(
            "headrace:requests_failed",
            "Requests that were refused or failed, by HTTP status.",
            ["model_name", "status"],
            registry=self._registry,
        )
        for reason in sorted(set(_FINISHED.values())):
            self._success.labels(model_name, reason)
        self.engine = EngineMetrics(model_name)
        self._registry.register(self.engine)

    def between_tokens(self, seconds: float) -> None:
        """Note the time between two tokens of an answer."""
        self._between.observe(seconds)

    def finished(self, result: Result) -> None:
        """Note a finished answer."""
        self._success.labels(self._name, _FINISHED[result.finish_reason]).inc()
        timings = result.timings
        self._queue.observe(timings.queue_s)
        if result.token_ids:
            self._ttft.observe(timings.ttft_s)
            self._prefill.observe(timings.prefill_s)
            self._decode.observe(timings.decode_s)
            self._whole.observe(timings.ttft_s + timings.decode_s)

    def failed(self, status: int) -> None:
        """Note a request that failed or was refused, by the status it has or, once a stream began, would have had."""
        if status not in (0, 499):  # a client that left has not been failed
            self._refused.labels(self._name, str(status)).inc()

    def render(self, told: tuple[dict[str, int], Totals] | None, restarts: int) -> bytes:
        """Return all metrics as text.

        Args:
            told: the engine's status and totals, None where it does not answer.
            restarts: how often the engine's process was started again.
        """
        self.engine.hear(told, restarts)
        return generate_latest(self._registry)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(
            f"vllm:{name}_seconds", f"Seconds {what}.", ["model_name"], buckets=buckets, registry=self._registry
        )
        return histogram.labels(self._name)
