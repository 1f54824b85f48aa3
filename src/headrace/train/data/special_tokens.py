"""The special tokens of a trained vocabulary, spelled as the V4.1 chat encoding spells them, and their order of ids.

Begin, end and padding have the ids of the release (0, 1, 2); all others follow directly, then the reserved ones, so
that the ids do not depend on the text a vocabulary was trained on.
"""

BEGIN = "<｜begin▁of▁sentence｜>"
END = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
SYSTEM = "<｜System｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
REMINDER = "<｜latest_reminder｜>"
THINK = "<think>"
END_THINK = "</think>"
TOOL_RESULT = "<tool_result>"
END_TOOL_RESULT = "</tool_result>"
DSML = "｜DSML｜"
TASKS = ("<｜action｜>", "<｜query｜>", "<｜authority｜>", "<｜domain｜>", "<｜title｜>", "<｜read_url｜>")
IMAGE = "<｜deepseek_image｜>"
FIM_BEGIN = "<｜fim▁begin｜>"
FIM_HOLE = "<｜fim▁hole｜>"
FIM_END = "<｜fim▁end｜>"

ALL = (
    *(BEGIN, END, PAD, SYSTEM, USER, ASSISTANT, REMINDER, THINK, END_THINK, TOOL_RESULT, END_TOOL_RESULT, DSML),
    *(*TASKS, IMAGE, FIM_BEGIN, FIM_HOLE, FIM_END),
)
"""Every special token but the reserved ones; the index in this list is the id."""

SHOWN = frozenset({THINK, END_THINK, TOOL_RESULT, END_TOOL_RESULT, DSML})
"""Tokens of one id that are part of an answer's text: decoding without special tokens keeps them."""

BEGIN_ID, END_ID, PAD_ID = 0, 1, 2
FIRST_RESERVED_ID = len(ALL)


def reserved_token(index: int) -> str:
    """Return the spelling of a reserved token; its id is `FIRST_RESERVED_ID + index`."""
    return f"<｜place▁holder▁no▁{index}｜>"
