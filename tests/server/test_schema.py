"""Requests made from the server's own OpenAPI document: whatever is sent, there is an answer in time, and no 5xx."""

from collections import Counter
from collections.abc import Iterator

import hypothesis
import pytest
import schemathesis
from hypothesis import strategies
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from tests.server.serving import Served, serving

FULL_EXAMPLES = 2000
ANSWER_S = 60.0  # a short context bounds every answer; one that takes longer hangs
QUIET = list(hypothesis.HealthCheck)


@pytest.fixture(scope="module")
def small() -> Iterator[Served]:
    """Serve with a short context, so that no answer is long."""
    with serving("--max-context", "64", "--slots", "4", "--api-key", "k", api_key="k") as found:
        yield found


def send(served: Served, examples: int) -> Counter[int]:
    """Send at least so many requests, right and wrong ones; return answers by status."""
    schema = schemathesis.openapi.from_url(f"{served.base_url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    each = -(-examples // sum(operation.method == "post" for operation in operations))  # others have few forms
    statuses: Counter[int] = Counter()
    for operation in operations:
        made = strategies.one_of(
            operation.as_strategy(generation_mode=GenerationMode.POSITIVE),
            operation.as_strategy(generation_mode=GenerationMode.NEGATIVE),
        )

        @hypothesis.settings(max_examples=each, deadline=None, suppress_health_check=QUIET, derandomize=True)
        @hypothesis.given(made)
        def one(case: schemathesis.Case) -> None:
            if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
                case.body["model"] = (
                    "headrace-nano"  # a text drawn by chance is no served model, and all would end there
                )
            answer = case.call(headers={"authorization": "Bearer k"}, timeout=ANSWER_S)
            statuses[answer.status_code] += 1
            case.validate_response(answer, checks=[not_a_server_error])

        one()
        assert served.process.poll() is None
    return statuses


def test_requests_made_from_the_document_are_answered_without_a_5xx(small: Served) -> None:
    statuses = send(small, 120)
    assert statuses[200] > 10
    assert statuses[400] > 10
    assert max(statuses) < 500


@pytest.mark.full
def test_two_thousand_such_requests_are(small: Served) -> None:
    statuses = send(small, FULL_EXAMPLES)
    print(f"answers by status: {dict(sorted(statuses.items()))}")
    assert statuses.total() >= FULL_EXAMPLES
    assert max(statuses) < 500
