"""What `/metrics` tells, in a registry of its own."""

from prometheus_client import CollectorRegistry

from headrace.core.errors import HeadraceError
from headrace.engine.result import Result


class Metrics:
    """Owns the registry."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name

    def between_tokens(self, seconds: float) -> None:
        """Note the time between two tokens of an answer."""

    def finished(self, result: Result) -> None:
        """Note a finished answer."""

    def failed(self, error: HeadraceError) -> None:
        """Note a request that failed or was refused."""
