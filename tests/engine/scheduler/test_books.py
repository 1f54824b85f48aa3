"""What every change of the books does to the blocks that are left, in a pool of 20."""

from headrace.engine.scheduler.books import Books
from headrace.engine.scheduler.request import Match
from tests.engine.scheduler.drive import ask, small


def family(**changes: int) -> Books:
    """Return books in which a prompt of ten tokens with two further answers has started: 3 blocks and 2 kept."""
    books = Books(small(**changes), available=20)
    books.add(ask("a", 1, 10, 3, children=("b", "c")))
    books.start(books.queue["a"], Match())
    return books


def test_a_start_takes_the_blocks_of_the_prompt_and_of_all_copies() -> None:
    books = family()
    assert (books.available, books.reserved, books.holdings.held, books.free_slots) == (15, 2, 3, 1)


def test_a_matched_block_counts_only_if_nobody_holds_it() -> None:
    books = family()
    books.add(ask("d", 2, 12, 1))
    books.start(books.queue["d"], Match(cached_tokens=8, holders=((frozenset(("a", "gone")), 1), (frozenset(), 1))))
    assert (books.available, books.holdings.held) == (13, 5)


def test_a_swap_to_host_memory_and_back() -> None:
    books = family()
    assert books.swap_out(books.started["a"]) == 3
    assert (books.available, books.reserved, books.host_used, books.free_slots) == (20, 0, 37, 4)
    books.swap_in(books.started["a"])
    assert (books.available, books.reserved, books.host_used, books.free_slots) == (15, 2, 0, 1)


def test_a_swap_moves_what_host_memory_takes_and_nothing_without_room_for_the_slot() -> None:
    books = family(host_bytes=36)
    assert books.swap_out(books.started["a"]) == 2
    assert (books.available, books.holdings.held, books.host_used) == (19, 1, 27)
    assert family(host_bytes=6).swap_out(family().started["a"]) is None


def test_a_fork_uses_the_kept_blocks() -> None:
    books = family()
    children = books.fork(books.started["a"])
    assert [(child.request_id, child.slot, child.blocks) for child in children] == [("b", 1, 3), ("c", 2, 3)]
    assert (books.available, books.reserved, books.holdings.held, books.free_slots) == (15, 0, 5, 1)


def test_an_end_gives_everything_back() -> None:
    books = family()
    books.end("a")
    assert (books.available, books.holdings.held, books.free_slots) == (20, 0, 4)


def test_a_further_answer_that_ends_early_gives_its_block_back() -> None:
    books = family()
    books.end("b")
    assert (books.available, books.reserved, books.free_slots) == (16, 1, 2)
    books.swap_out(books.started["a"])
    books.end("c")
    assert (books.available, books.started["a"].unforked) == (20, 0)
