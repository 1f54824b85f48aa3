"""The errors headrace raises on purpose, and what the command line makes of them.

Every message is one sentence that names the thing, its value and what would be accepted. Whatever a user can cause is
a `UserError`; an `InternalError` says that headrace broke a rule of its own.
"""


class HeadraceError(Exception):
    """Carry one sentence for the reader and, where known, the name of the parameter it is about."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class UserError(HeadraceError):
    """Refuse an input: wrong use, wrong value, or something headrace does not support. Exit status 2."""


class CheckpointError(UserError):
    """Refuse a checkpoint: a file, tensor or number in it is not what the configuration calls for. Exit status 2."""


class CapacityError(UserError):
    """Refuse work that does not fit: memory, disk or context length. Exit status 2."""


class InternalError(HeadraceError):
    """Report that headrace broke one of its own rules. Exit status 1."""


class OverloadedError(CapacityError):
    """Refuse a request because too many wait already; the same request may be accepted later. Exit status 2."""


class EngineError(HeadraceError):
    """Report that the engine's process ended while a request was in it, or does not start again. Exit status 1."""
