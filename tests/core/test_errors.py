import pytest

from headrace.core.errors import CapacityError, CheckpointError, HeadraceError, InternalError, UserError


@pytest.mark.parametrize("error", [UserError, CheckpointError, CapacityError, InternalError])
def test_an_error_carries_its_sentence_and_its_parameter(error: type[HeadraceError]) -> None:
    problem = error("the thing is 3; 1 or 2 is accepted.", param="thing")
    assert str(problem) == problem.message == "the thing is 3; 1 or 2 is accepted."
    assert problem.param == "thing"
    assert error("x").param is None


def test_what_a_user_can_cause_is_told_apart_from_what_headrace_did() -> None:
    assert issubclass(CheckpointError, UserError)
    assert issubclass(CapacityError, UserError)
    assert not issubclass(InternalError, UserError)
