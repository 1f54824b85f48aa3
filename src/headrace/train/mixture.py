"""What a recipe's rows are made of: corpus, vocabulary, generated tasks, held-out rows, and the stream of batches.

Everything follows from the recipe, so a run that resumes builds the same again. Read `data/stream.py` before and
`passes.py` after.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from headrace.core.errors import UserError
from headrace.memory.addressing import Addressing
from headrace.models.deepseek_v41.architecture import Config
from headrace.text.bpe import Encoder
from headrace.text.token_map import build_token_map
from headrace.text.tokenizer import Tokenizer
from headrace.train.data import corpus as sources
from headrace.train.data import special_tokens
from headrace.train.data.corpus import Corpus, Source, SourceRecord
from headrace.train.data.documents import TokenizedText, tokenize
from headrace.train.data.draws import Draws
from headrace.train.data.packing import Ids, PackedRow, Sample, pack_all
from headrace.train.data.stream import Stream, WeightedTask
from headrace.train.data.tasks.machines import BracketTask, MachineTask
from headrace.train.data.tasks.pairs import PairTask, PairVocabulary
from headrace.train.data.tasks.puzzles import PUZZLES
from headrace.train.data.tasks.retrieval import RetrievalTask
from headrace.train.data.tasks.symbols import AdditionTask, CopyTask, DigitTask
from headrace.train.data.tasks.task import Task
from headrace.train.data.tokenizer import token_bytes, train_vocabulary
from headrace.train.recipe import Recipe, SourceSettings, TaskSettings, TextSettings, TokenizerSettings

TASKS: dict[str, type] = {
    "pairs": PairTask,
    "retrieval": RetrievalTask,
    "copy": CopyTask,
    "addition": AdditionTask,
    "digits": DigitTask,
    "brackets": BracketTask,
    "machine": MachineTask,
}
_PAIR_SIZES = ("num_keys", "num_values", "num_hops", "num_noise")


@dataclass(frozen=True, kw_only=True, eq=False)
class Material:
    """What the trainer reads.

    Attributes:
        config: the model's, with the n-gram classes of this vocabulary.
        addressing: n-gram rows; None without n-gram memory.
        stream: the batches of the run.
        tasks: the generated tasks, to judge by.
        held_out: rows of text that are never trained on.
        tokenizer: text of the `tokenizer.json`; None without one.
        bytes_V: [V] bytes of text per token; None without a tokenizer.
        records: where the text came from.
    """

    config: Config
    addressing: Addressing | None
    stream: Stream
    tasks: tuple[Task, ...]
    held_out: tuple[PackedRow, ...]
    tokenizer: str | None
    bytes_V: Ids | None
    records: tuple[SourceRecord, ...]


def gather_material(recipe: Recipe, tokenizer: str | None = None) -> Material:
    """Read, split and encode the text, and make the tasks.

    Args:
        recipe: what to make.
        tokenizer: text of a `tokenizer.json` that an earlier part of the run made; None makes it.

    Raises:
        UserError: there is no text, a file is not UTF-8, a task has an unknown field, or sizes do not fit together.
    """
    if recipe.model is None:
        raise UserError(f"recipe {recipe.name!r} has no model to train.", param="model")
    train: TokenizedText | None = None
    held: tuple[PackedRow, ...] = ()
    records: tuple[SourceRecord, ...] = ()
    encoder: Encoder | None = None
    if recipe.tokenizer is not None:
        documents = None if recipe.text is None else _read_corpus(recipe.text)
        sides = ((), ()) if recipe.text is None or documents is None else _split(documents, recipe.text)
        tokenizer = tokenizer or _make_tokenizer(recipe.tokenizer, [document.text for document in sides[0]])
        encoder = Encoder(tokenizer)
        if recipe.text is not None and documents is not None:
            records = documents.records
            train = tokenize(
                sides[0],
                encoder,
                seed=recipe.seed,
                fim_rate=recipe.text.fim_rate,
                max_characters=recipe.text.max_characters,
            )
            held = _held_out_rows(tokenize(sides[1], encoder, max_characters=recipe.text.max_characters), recipe)
    tasks = tuple(make_task(settings, encoder, train) for settings in recipe.tasks)
    config, addressing = _resolve(recipe.model, tokenizer)
    return Material(
        config=config,
        addressing=addressing,
        stream=Stream(
            seed=recipe.seed,
            text=train,
            text_weight=recipe.text.weight if recipe.text else 0.0,
            tasks=[WeightedTask(task, settings.weight) for task, settings in zip(tasks, recipe.tasks, strict=True)],
            pad_id=config.pad_token_id,
        ),
        tasks=tasks,
        held_out=held,
        tokenizer=tokenizer,
        bytes_V=None if tokenizer is None else token_bytes(Tokenizer.from_text(tokenizer)),
        records=records,
    )


def _source(settings: SourceSettings) -> list[Source]:
    if settings.kind == "stdlib":
        return [sources.stdlib_source()]
    if settings.kind == "packages":
        return sources.package_sources(settings.names or None)
    return [sources.folder_source(settings.path or "", settings.licence or "")]


def _read_corpus(text: TextSettings) -> Corpus:
    """Collect the documents, and keep only some, chosen by a hash of their names, where there are too many."""
    found = sources.collect([source for settings in text.sources for source in _source(settings)])
    if text.max_bytes is None:
        return found
    kept, size = [], 0
    for document in sorted(found.documents, key=lambda document: hashlib.sha256(document.name.encode()).digest()):
        size += len(document.text.encode())
        if size <= text.max_bytes:
            kept.append(document)
    return Corpus(documents=tuple(kept), records=found.records)


def _split(corpus: Corpus, text: TextSettings) -> tuple[Sequence[sources.Document], Sequence[sources.Document]]:
    return corpus.split(text.held_out_share, salt=text.salt, held_out_groups=text.held_out_groups)


def _make_tokenizer(settings: TokenizerSettings, texts: Sequence[str]) -> str:
    if settings.file is not None:
        path = Path(settings.file)
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            raise UserError(f"the tokenizer file {path} of the recipe cannot be read: {problem}.", "file") from None
    used, size = [], 0
    for text in texts:
        used.append(text)
        size += len(text.encode())
        if size >= settings.max_bytes:
            break
    return train_vocabulary(used, settings.size, settings.num_reserved).document


def _held_out_rows(text: TokenizedText, recipe: Recipe) -> tuple[PackedRow, ...]:
    """Pack as many held-out documents as make the wanted number of rows, in an order of their own."""
    row_tokens = int(max(recipe.sequence_length.values))
    samples = text.samples(row_tokens)
    room = recipe.evaluation.text_rows * row_tokens
    chosen: list[Sample] = []
    for index in Draws(recipe.seed, "held-out").permutation(len(samples)).tolist():
        if len(samples[index]) <= room:
            chosen.append(samples[index])
            room -= len(samples[index])
    pad_id = 0 if recipe.model is None else recipe.model.pad_token_id
    return tuple(pack_all(chosen, row_tokens, pad_id)[: recipe.evaluation.text_rows])


def make_task(settings: TaskSettings, encoder: Encoder | None, text: TokenizedText | None) -> Task:
    """Make one generated task.

    Args:
        settings: kind and fields. The pair probe also takes `num_keys`, `num_values` and `num_hops`; its ids are the
            reserved ones of the vocabulary and its noise is text, or, without a vocabulary, `num_noise` ids of its own.
            A retrieval task takes `puzzle`, a name.
        encoder: the vocabulary; None without one.
        text: noise for the pair probe.

    Raises:
        UserError: the kind or a field is unknown, the task needs a vocabulary, or a value is out of range.
    """
    if settings.kind not in TASKS:
        raise UserError(f"task {settings.kind!r} is unknown; {', '.join(sorted(TASKS))} are accepted.", param="kind")
    kind, options = TASKS[settings.kind], dict(settings.options)
    known = {field.name for field in fields(kind)} - {"encoder", "vocabulary"}
    known |= set(_PAIR_SIZES) if kind is PairTask else set()
    for name in options:
        if name not in known:
            raise UserError(
                f"task {settings.kind!r} has no field {name!r}; {', '.join(sorted(known))} are accepted.", param=name
            )
    if kind is not PairTask and encoder is None:
        raise UserError(f"task {settings.kind!r} needs a vocabulary; give the recipe a tokenizer.", param="kind")
    if kind is RetrievalTask:
        options.setdefault("name", options.get("puzzle"))
        options["puzzle"] = _choose(PUZZLES, options.get("puzzle"))
    try:
        if kind is PairTask:
            sizes = {name: options.pop(name) for name in _PAIR_SIZES if name in options}
            options["vocabulary"] = _pair_vocabulary(sizes, encoder, text)
            options.setdefault("name", "pairs")
        else:
            options["encoder"] = encoder
        task: Task = kind(**options)
    except TypeError as problem:
        raise UserError(f"task {settings.kind!r} cannot be made of its fields: {problem}.", param="options") from None
    return task


def _choose(table: Mapping[str, Any], name: Any) -> Any:
    if name not in table:
        raise UserError(f"puzzle {name!r} is unknown; {', '.join(sorted(table))} are accepted.", param="puzzle")
    return table[name]


def _pair_vocabulary(sizes: Mapping[str, int], encoder: Encoder | None, text: TokenizedText | None) -> PairVocabulary:
    if encoder is None:
        return PairVocabulary.alone(**sizes)
    vocabulary = PairVocabulary(
        **{name: size for name, size in sizes.items() if name != "num_noise"},
        first_pair_id=special_tokens.FIRST_RESERVED_ID,
        noise_ids=np.array([special_tokens.PAD_ID]) if text is None else text.token_ids.astype(np.int64),
        is_noise_text=text is not None,
    )
    last = vocabulary.num_ids - 1
    if encoder.token_id(special_tokens.reserved_token(last)) != special_tokens.FIRST_RESERVED_ID + last:
        raise UserError(
            f"the pair probe needs {vocabulary.num_ids} reserved ids in a row; as many as num_reserved is accepted.",
            param="num_reserved",
        )
    return vocabulary


def _resolve(config: Config, tokenizer: str | None) -> tuple[Config, Addressing | None]:
    """Set the number of n-gram classes, which only the vocabulary knows, and build the n-gram addressing."""
    if config.engram is None:
        return config, None
    if tokenizer is None:
        raise UserError("a model with n-gram memory needs a vocabulary; give the recipe a tokenizer.", "tokenizer")
    token_map, num_classes = build_token_map(Tokenizer.from_text(tokenizer))
    engram = replace(config.engram, compressed_vocab_size=num_classes)
    addressing = Addressing(
        engram.layer_ids,
        engram.num_embeddings,
        engram.max_ngram,
        engram.first_prime_above,
        engram.num_hashes,
        engram.pad_token_id,
        engram.compressed_vocab_size,
        token_map,
    )
    return replace(config, engram=engram), addressing
