"""Effort: names as the encoding has them, whole numbers written over the one place where it stands."""

from typing import Any

import deepseek_recipe as recipe
import pytest

from headrace.core.errors import UserError
from headrace.server.protocol.effort import NAMES
from tests.server.protocol.nano import FOLDER, chat, messages, prompt_text, protocol, responses, user

LINE = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
START = "<｜begin▁of▁sentence｜><｜System｜>"
END = "<｜User｜>hi<｜Assistant｜><think>"
ENCODING = recipe.DeepseekV41Encoding().with_tokenizer(recipe.Tokenizer.from_file(str(FOLDER / "tokenizer.json")))


@pytest.mark.parametrize(("name", "number"), NAMES.items())
def test_names_have_their_numbers_in_every_dialect(name: str, number: int | None) -> None:
    turns = [
        chat({"messages": [user("hi")], "reasoning_effort": name}),
        responses({"input": "hi", "reasoning": {"effort": name}}),
        messages({"messages": [user("hi")], "output_config": {"effort": name}}),
    ]
    expected = START + LINE.format(number) + END
    if number is None:
        expected = "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜></think>"
    assert [prompt_text(turn) for turn in turns] == [expected] * 3
    assert [turn.effort for turn in turns] == [number] * 3


@pytest.mark.parametrize("number", [1, 5, 50, 75, 99, 100])
def test_whole_numbers_stand_in_the_prompt_byte_for_byte(number: int) -> None:
    system = {"role": "system", "content": "Reasoning Effort: 75 (range 1-100, stays"}
    turn = chat({"messages": [system, user("75 and 50")], "reasoning_effort": number})
    expected = f"{START}{LINE.format(number)}{system['content']}<｜User｜>75 and 50<｜Assistant｜><think>"
    assert prompt_text(turn) == expected
    assert turn.effort == number
    assert responses({"input": "hi", "reasoning": {"effort": number}}).effort == number
    assert messages({"messages": [user("hi")], "output_config": {"effort": number}}).effort == number


@pytest.mark.parametrize(("name", "number"), [("low", 50), ("high", 75), ("max", 100)])
def test_a_number_that_has_a_name_gives_the_ids_of_the_package(name: str, number: int) -> None:
    body = {"messages": [user("hi")], "reasoning_effort": name, "model": "nano"}
    options = recipe.ConversionOptions().with_model_alias("nano", recipe.ModelVersion.DeepseekV41Flash)
    found = ENCODING.encode(recipe.ChatCompletionRequest(body).convert(options).conversation)
    assert chat({"messages": [user("hi")], "reasoning_effort": number}).prompt_ids == found
    assert chat({"messages": [user("hi")], "reasoning_effort": name}).prompt_ids == found


@pytest.mark.parametrize("effort", [0, 101, -1, "50", "High", "", "very"])
def test_other_efforts_are_refused_with_what_is_accepted(effort: Any) -> None:
    with pytest.raises(
        UserError, match=r"reasoning_effort is .*; accepted are none, .* and whole numbers from 1 to 100"
    ):
        chat({"messages": [user("hi")], "reasoning_effort": effort})


def test_without_an_effort_it_is_high_and_without_thinking_there_is_none() -> None:
    assert chat({"messages": [user("hi")]}).effort == 75
    off = chat({"messages": [user("hi")], "thinking": {"type": "disabled"}})
    assert (off.effort, off.is_thinking) == (None, False)


def test_the_older_encoding_has_names_only() -> None:
    older = protocol("v4")
    assert chat({"messages": [user("hi")], "reasoning_effort": "max"}, older).effort is None
    with pytest.raises(UserError, match="reasoning_effort is 60; this model's encoding accepts none, minimal"):
        chat({"messages": [user("hi")], "reasoning_effort": 60}, older)
