"""A small trained vocabulary and texts that the tests of training data share."""

import functools

from headrace.text.bpe import Encoder
from headrace.text.tokenizer import Tokenizer
from headrace.train.data.corpus import Document
from headrace.train.data.tokenizer import Vocabulary, train_vocabulary

SENTENCE = "the configuration of a service reads values from files and returns an error code when lines are missing"
WORDS = SENTENCE.split()
TEXTS = tuple(
    f"def {first}_{second}(x):\n    return x + {len(first)}\n\n# {second} {first}: ünïcode\n"
    for first in WORDS
    for second in WORDS
)


@functools.cache
def vocabulary() -> Vocabulary:
    return train_vocabulary(TEXTS, 400, num_reserved=40)


@functools.cache
def encoder() -> Encoder:
    return vocabulary().encoder()


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_text(vocabulary().document)


def documents(lengths: list[int]) -> list[Document]:
    """Documents of the given numbers of characters, all different."""
    joined = "".join(TEXTS)
    return [Document(f"made:{i}", f"made:{i}", joined[i : i + length]) for i, length in enumerate(lengths)]
