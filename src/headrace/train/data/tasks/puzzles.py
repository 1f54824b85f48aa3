"""The natural forms of retrieval: a value in a configuration, the error of a log, a definition, a tool's result.

Each function writes the pieces of one prompt; `retrieval.py` puts them together. Filler is of the same kind as what is
asked about, so an answer needs the right line and not just a line that stands out; the log alone has one that does.
"""

from headrace.train.data import special_tokens as special
from headrace.train.data.draws import Draws
from headrace.train.data.tasks.retrieval import Needle, Puzzle

_WORDS = (
    "access", "account", "agent", "alarm", "anchor", "archive", "asset", "audit", "backup", "badge", "balance",
    "banner", "batch", "beacon", "binary", "bottle", "bridge", "broker", "bucket", "budget", "buffer", "button",
    "cable", "cache", "camera", "canvas", "carrier", "cart", "catalog", "cell", "chain", "channel", "client",
    "clock", "cluster", "column", "compass", "contract", "copper", "corner", "counter", "courier", "crystal",
    "cursor", "dataset", "delivery", "device", "digest", "domain", "driver", "editor", "engine", "entry", "event",
    "export", "feature", "filter", "folder", "forest", "frame", "garden", "gateway", "glacier", "graph", "harbor",
    "header", "helper", "hotel", "image", "index", "inlet", "island", "jacket", "kernel", "ladder", "lantern",
    "layer", "ledger", "lemon", "library", "limit", "linker", "loader", "market", "marble", "matrix", "memory",
    "meter", "mirror", "module", "monitor", "mountain", "network", "node", "notice", "object", "orange", "order",
    "owner", "packet", "panel", "parcel", "partner", "pattern", "pepper", "pilot", "pipeline", "planet", "player",
    "pocket", "policy", "portal", "printer", "profile", "project", "proxy", "queue", "quota", "radar", "record",
    "region", "relay", "report", "river", "rocket", "router", "saddle", "sample", "scanner", "schema", "season",
    "sensor", "server", "session", "shadow", "shard", "signal", "silver", "socket", "source", "spider", "spring",
    "stage", "station", "storage", "stream", "summit", "switch", "symbol", "table", "tablet", "target", "task",
    "temple", "ticket", "timber", "token", "tower", "tracker", "trail", "tunnel", "update", "vector", "vendor",
    "violet", "volume", "wagon", "walnut", "window", "winter", "worker", "yard", "zone",
)  # fmt: skip
_BEGIN_TURN = special.BEGIN + special.USER
_END_QUESTION = special.ASSISTANT + special.END_THINK


def config_value(draws: Draws, num_questions: int) -> Puzzle:
    """Lines "cache.limit_quota = 4821"; asked is the value of a key that occurs once."""
    keys = _names(draws, num_questions, "{0}.{1}_{2}")
    needles = [
        Needle(f"{key} = {number}\n", f"What is the value of {key}?", number)
        for key, number in ((key, _number(draws)) for key in keys)
    ]

    def block() -> str:
        return f"{_other(draws, keys, '{0}.{1}_{2}')} = {_number(draws)}\n"

    return Puzzle(f"{_BEGIN_TURN}This is the configuration of a service.\n", needles, block, "")


def log_error(draws: Draws, num_questions: int) -> Puzzle:
    """Lines of a log, one of which is an error; asked is its code. There is one question whatever `num_questions`."""
    del num_questions  # a second error line would make the question ambiguous
    code = _number(draws)

    def line(level: str, end: str) -> str:
        return f"{level} {draws.pick(_WORDS)}[{_number(draws)}]: {draws.pick(_WORDS)} {end}\n"

    def block() -> str:
        return line(draws.pick(("INFO", "INFO", "DEBUG")), f"done in {_number(draws)} ms")

    needle = Needle(line("ERROR", f"failed with code {code}"), "Which code does the error have?", code)
    return Puzzle(f"{_BEGIN_TURN}This is the log of a service.\n", [needle], block, "")


def definition(draws: Draws, num_questions: int) -> Puzzle:
    """Python files with many small functions; asked is what one of them returns."""
    names = _names(draws, num_questions, "{0}_{1}_{2}")
    needles = [
        Needle(f"def {name}():\n    return {number}\n", f"What does {name}() return?", number)
        for name, number in ((name, _number(draws)) for name in names)
    ]

    def block() -> str:
        name = _other(draws, names, "{0}_{1}_{2}")
        number = _number(draws)
        return draws.pick(
            (
                f"def {name}():\n    return {number}\n",
                f"def {name}(x):\n    return x + {number}\n",
                f"{name} = {number}\n",
                f"# file {name}.py\n",
            )
        )

    return Puzzle(f"{_BEGIN_TURN}These are the files of a program.\n", needles, block, "")


def tool_result(draws: Draws, num_questions: int) -> Puzzle:
    """A conversation with tool calls; asked is what a call far back returned."""
    keys = _names(draws, num_questions, "{0}-{1}-{2}")
    needles = [
        Needle(_lookup(key, number), f"What was the price of {key}?", number)
        for key, number in ((key, _number(draws)) for key in keys)
    ]

    def block() -> str:
        key = _other(draws, keys, "{0}-{1}-{2}")
        if draws.is_below(0.25):
            return _lookup(key, _number(draws))
        return f"{special.USER}Please note {key}.{_END_QUESTION}Noted: {key}.{special.END}"

    return Puzzle(f"{special.BEGIN}{special.SYSTEM}You look up prices.", needles, block, special.USER)


PUZZLES = {
    "config_value": config_value,
    "log_error": log_error,
    "definition": definition,
    "tool_result": tool_result,
}
"""Name -> puzzle, e.g. for `RetrievalTask(name=name, puzzle=PUZZLES[name], ...)`."""


def _lookup(key: str, number: str) -> str:
    """Return a turn that calls a tool, the turn with its result, and a short answer.

    Source: specification 9, tool calls.
    """
    call = (
        f"\n\n<{special.DSML} calls>\n"
        f'<{special.DSML} invoke name="get_price">\n'
        f'<{special.DSML} parameter name="item" string="true">{key}</{special.DSML} parameter>\n'
        f"</{special.DSML} invoke>\n"
        f"</{special.DSML} calls>"
    )
    return (
        f"{special.USER}Look up {key}.{_END_QUESTION}{call}{special.END}"
        f"{special.USER}{special.TOOL_RESULT}{number}{special.END_TOOL_RESULT}{_END_QUESTION}Done.{special.END}"
    )


def _names(draws: Draws, count: int, form: str) -> list[str]:
    """Return different names."""
    names: dict[str, None] = {}
    while len(names) < count:
        names[_name(draws, form)] = None
    return list(names)


def _other(draws: Draws, taken: list[str], form: str) -> str:
    """Return a name that is none of those asked about."""
    while (name := _name(draws, form)) in taken:
        pass
    return name


def _name(draws: Draws, form: str) -> str:
    return form.format(*(_WORDS[index] for index in draws.integers(len(_WORDS), 3)))


def _number(draws: Draws) -> str:
    return str(draws.between(1000, 9999))
