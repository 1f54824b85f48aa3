"""The fused-pair probe: every query has one right answer, far away, that nothing but its pairs gives away."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import UserError
from headrace.train.data.draws import Draws
from headrace.train.data.packing import IGNORE, Sample
from headrace.train.data.tasks.pairs import PairTask, PairVocabulary

ONE_HOP = PairVocabulary.alone()
HOPS = PairVocabulary.alone(num_keys=24, num_values=24, num_hops=3)
CHANCE = 1 / 16


def make(task: PairTask, seed: int = 0, room: int = 192) -> Sample:
    sample = task.make(Draws(seed), room)
    assert sample is not None
    return sample


def read_pairs(vocabulary: PairVocabulary, ids: np.ndarray) -> dict[int, tuple[int, int]]:
    """Key -> (value, place) of the pairs among some tokens."""
    pairs = {}
    for place, token_id in enumerate(ids.tolist()):
        code = token_id - vocabulary.first_pair_id
        if 0 <= code < vocabulary.num_keys * vocabulary.num_values:
            key, value = divmod(code, vocabulary.num_values)
            assert key not in pairs
            pairs[key] = (value, place)
    return pairs


def solve(vocabulary: PairVocabulary, sample: Sample, reach: int | None = None) -> tuple[list[int | None], list[int]]:
    """Answer every query by looking the pairs up; with `reach`, only those among that many tokens before the query.

    Returns the answered label of every query, None where a pair was out of reach, and the distance of the nearest
    pair used.
    """
    first_query = vocabulary.first_pair_id + vocabulary.num_keys * vocabulary.num_values
    first_value = first_query + vocabulary.num_hops * vocabulary.num_keys
    answers, distances = [], []
    for query in np.flatnonzero(sample.labels != IGNORE).tolist():
        hops, key = divmod(int(sample.token_ids[query]) - first_query, vocabulary.num_keys)
        begin = 0 if reach is None else max(0, query - reach)
        pairs = read_pairs(vocabulary, sample.token_ids[begin:query])
        places = []
        for _ in range(hops + 1):
            key, place = pairs.get(key, (None, 0))
            if key is None:
                break
            places.append(begin + place)
        answers.append(None if key is None else first_value + key)
        distances.append(query - max(places, default=query))
    return answers, distances


@given(st.integers(0, 10**6))
def test_a_lookup_answers_every_query(seed: int) -> None:
    sample = make(PairTask(vocabulary=ONE_HOP), seed)
    answers, distances = solve(ONE_HOP, sample)
    assert answers == sample.labels[sample.labels != IGNORE].tolist()
    assert len(answers) == 48
    assert [answer.distance for answer in sample.answers] == distances
    assert [answer.start for answer in sample.answers] == np.flatnonzero(sample.labels != IGNORE).tolist()


@pytest.mark.parametrize("hops", [2, 3])
def test_following_the_chain_answers_every_query(hops: int) -> None:
    for seed in range(20):
        sample = make(PairTask(vocabulary=HOPS, hops=hops, num_pairs=17), seed)
        answers, distances = solve(HOPS, sample)
        assert answers == sample.labels[sample.labels != IGNORE].tolist()
        assert [answer.distance for answer in sample.answers] == distances


def test_fewer_hops_than_asked_give_wrong_answers() -> None:
    sample = make(PairTask(vocabulary=HOPS, hops=2, num_pairs=18))
    first_query, first_value = 1 + 24 * 24, 1 + 24 * 24 + 3 * 24
    pairs = read_pairs(HOPS, sample.token_ids)
    for query in np.flatnonzero(sample.labels != IGNORE).tolist():
        key = (int(sample.token_ids[query]) - first_query) % 24
        assert first_value + pairs[key][0] != sample.labels[query]


@given(st.integers(0, 10**6), st.integers(1, 60))
def test_nothing_within_the_least_distance_answers_a_query(seed: int, min_distance: int) -> None:
    sample = make(PairTask(vocabulary=ONE_HOP, min_distance=min_distance), seed)
    answers, _ = solve(ONE_HOP, sample, reach=min_distance - 1)
    assert set(answers) == {None}
    assert min(answer.distance for answer in sample.answers if answer.distance) >= min_distance


def test_distances_keep_both_bounds() -> None:
    task = PairTask(vocabulary=ONE_HOP, min_distance=40, max_distance=120)
    distances = [answer.distance for seed in range(400) for answer in make(task, seed).answers]
    assert min(distances) == 40
    assert max(distances) == 120


def test_the_values_of_a_row_say_nothing_about_which_is_asked() -> None:
    """Guessing the most frequent value of the row, or the most frequent answer so far, stays at chance."""
    right, total = 0, 0
    for seed in range(60):
        sample = make(PairTask(vocabulary=ONE_HOP), seed)
        values = Counter(value for value, _ in read_pairs(ONE_HOP, sample.token_ids).values())
        assert set(values.values()) == {1}
        labels = sample.labels[sample.labels != IGNORE]
        guess = ONE_HOP.value_ids(np.array([values.most_common(1)[0][0]]))[0]
        right, total = right + int((labels == guess).sum()), total + len(labels)
        assert set(Counter(labels.tolist()).values()) == {3}
    assert right / total == CHANCE


@pytest.mark.parametrize(("num_pairs", "num_queries"), [(8, 48), (24, 48), (32, 10), (5, 7)])
def test_values_and_questions_are_used_equally_often(num_pairs: int, num_queries: int) -> None:
    sample = make(PairTask(vocabulary=ONE_HOP, num_pairs=num_pairs, num_queries=num_queries))
    values = Counter(value for value, _ in read_pairs(ONE_HOP, sample.token_ids).values())
    asked = Counter(sample.token_ids[-num_queries:].tolist())
    assert sum(values.values()) == num_pairs
    for counts in (values, asked):
        assert max(counts.values()) - min(counts.values()) <= 1


def test_ids_are_those_of_the_vocabulary() -> None:
    noise = np.arange(500, 520)
    vocabulary = PairVocabulary(num_keys=8, num_values=4, first_pair_id=100, noise_ids=noise)
    sample = make(PairTask(vocabulary=vocabulary, num_pairs=4, num_queries=6, begin_id=0))
    assert sample.token_ids[0] == 0
    others = sample.token_ids[1:-6]
    assert ((others >= 100) & (others < 132)).sum() == 4
    assert np.isin(others[(others < 100) | (others >= 132)], noise).all()
    assert ((sample.token_ids[-6:] >= 132) & (sample.token_ids[-6:] < 140)).all()
    assert ((sample.labels[-6:] >= 140) & (sample.labels[-6:] < 144)).all()
    assert vocabulary.num_ids == 44
    assert ONE_HOP.size == 1 + 32 * 16 + 32 + 16 + 64


def test_noise_of_text_keeps_its_order() -> None:
    vocabulary = PairVocabulary(first_pair_id=1000, noise_ids=np.arange(900), is_noise_text=True)
    ids = make(PairTask(vocabulary=vocabulary, num_pairs=4, num_queries=6)).token_ids[:-6]
    steps = np.diff(ids[ids < 900])
    assert set(steps.tolist()) <= {1, 2, 3, 4, 5, -899}  # more than 1 where a pair replaced a token


def test_a_row_without_room_is_none_and_a_fixed_length_is_kept() -> None:
    task = PairTask(vocabulary=ONE_HOP, min_distance=100)
    assert task.make(Draws(0), 48 + 99 + 15) is None
    assert task.make(Draws(0), 48 + 99 + 16) is not None
    fixed = PairTask(vocabulary=ONE_HOP, num_tokens=150)
    assert len(make(fixed, room=400)) == 150
    assert fixed.make(Draws(0), 149) is None


@pytest.mark.parametrize(
    ("make_wrong", "message"),
    [
        (lambda: PairVocabulary(first_pair_id=0, noise_ids=np.arange(5)), "ids other than its own"),
        (lambda: PairVocabulary(first_pair_id=0, noise_ids=np.arange(0)), "ids other than its own"),
        (lambda: PairVocabulary.alone(num_hops=2), "as many values as keys"),
        (lambda: PairVocabulary.alone(num_keys=0), "at least one key"),
        (lambda: PairTask(vocabulary=ONE_HOP, num_pairs=33), "33 different keys"),
        (lambda: PairTask(vocabulary=ONE_HOP, hops=2), "has 1 to 1"),
        (lambda: PairTask(vocabulary=HOPS, hops=3, num_pairs=20), "25 different keys"),
        (lambda: PairTask(vocabulary=HOPS, hops=3, num_pairs=3), "at least 4"),
        (lambda: PairTask(vocabulary=ONE_HOP, num_queries=0), "at least one query"),
    ],
)
def test_what_cannot_be_asked_is_refused(make_wrong, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_wrong()
