"""What clients are told of errors, in each dialect, and what they are not told."""

import json

import pytest

from headrace.core.errors import (
    CapacityError,
    CheckpointError,
    EngineError,
    HeadraceError,
    InternalError,
    OverloadedError,
    UserError,
)
from headrace.server import errors

SECRET = "/srv/models/secret/model-00001.safetensors is broken"

CASES = [
    (UserError("top_k is 0", param="top_k"), 400, "invalid_request_error", "invalid_request_error", None),
    (CapacityError("the prompt is too long"), 400, "invalid_request_error", "invalid_request_error", None),
    (errors.NoKey("no key"), 401, "authentication_error", "authentication_error", "invalid_api_key"),
    (errors.Forbidden("not here"), 403, "permission_error", "permission_error", None),
    (errors.UnknownModel("no such model"), 404, "invalid_request_error", "not_found_error", "model_not_found"),
    (errors.TooLarge("too large"), 413, "invalid_request_error", "request_too_large", None),
    (OverloadedError("too many wait"), 429, "rate_limit_error", "rate_limit_error", "overloaded"),
    (InternalError(SECRET), 500, "server_error", "api_error", "internal_error"),
    (CheckpointError(SECRET), 500, "server_error", "api_error", "damaged_checkpoint"),
    (RuntimeError(SECRET), 500, "server_error", "api_error", "internal_error"),
    (EngineError(SECRET), 503, "server_error", "overloaded_error", "engine_down"),
    (errors.Stopping("the server is being stopped"), 503, "server_error", "overloaded_error", "stopping"),
    (errors.OutOfTime("time was over"), 503, "server_error", "overloaded_error", "timeout"),
]


@pytest.mark.parametrize(("error", "status", "openai", "anthropic", "code"), CASES, ids=lambda case: str(case)[:30])
def test_every_error_has_its_status_and_the_shape_of_the_dialect(
    error: Exception, status: int, openai: str, anthropic: str, code: str | None
) -> None:
    answer = errors.response(error, "openai")
    assert answer.status_code == status
    assert ("retry-after" in answer.headers) == (status in {429, 503})
    told = json.loads(answer.body)["error"]
    assert (told["type"], told["code"]) == (openai, code)
    other = json.loads(errors.response(error, "anthropic").body)
    assert (other["type"], other["error"]["type"]) == ("error", anthropic)
    assert other["error"]["message"] == told["message"]
    assert SECRET not in answer.body.decode()
    if isinstance(error, HeadraceError) and error.message != SECRET:
        assert told["message"] == error.message


def test_every_dialect_has_its_error_event() -> None:
    error = OverloadedError("too many wait")
    assert errors.event(error, "openai", 3)[0] is None
    assert json.loads(errors.event(error, "openai", 3)[1])["error"]["code"] == "overloaded"
    assert errors.event(error, "anthropic", 3)[0] == "error"
    assert json.loads(errors.event(error, "anthropic", 3)[1])["error"]["type"] == "rate_limit_error"
    name, data = errors.event(error, "responses", 3)
    told = json.loads(data)
    assert (name, told["type"], told["code"], told["sequence_number"]) == ("error", "error", "overloaded", 3)


@pytest.mark.parametrize(
    ("path", "dialect"),
    [("/v1/messages", "anthropic"), ("/v1/messages/count_tokens", "anthropic"), ("/v1/responses/x", "responses")],
)
def test_a_path_has_its_dialect(path: str, dialect: str) -> None:
    assert errors.dialect_of(path) == dialect
    assert errors.dialect_of("/v1/completions") == "openai"


def test_what_a_client_is_not_told_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    errors.response(InternalError(SECRET), "openai")
    assert SECRET in caplog.text
