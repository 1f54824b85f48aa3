"""Plan one step: a pure function of the books, the pool, the time and what the prefix cache answers."""

from collections.abc import Mapping

from headrace.core.errors import InternalError
from headrace.engine.scheduler.admission import plan_starts
from headrace.engine.scheduler.books import Books
from headrace.engine.scheduler.boundary import end_requests
from headrace.engine.scheduler.decode import plan_decodes
from headrace.engine.scheduler.plan import Pool, StepPlan
from headrace.engine.scheduler.prefill import plan_prefills
from headrace.engine.scheduler.request import Matcher
from headrace.engine.scheduler.work import Work


def plan_step(
    books: Books, now: float, pool: Pool, match: Matcher, drafts: Mapping[str, int] | None = None
) -> tuple[StepPlan, Books]:
    """Return the plan and the books after it; the books given are not changed.

    A bound: in every step with a live request at least one row is planned, or one request ends, or the only running
    request has just come back from host memory. So what is submitted is over after at most 2 R + Q steps, with R the
    sum of all rows (prompt and answer) and Q the number of requests.

    Raises:
        InternalError: the pool has more blocks than the books leave, or the prefix cache answers nonsense.
    """
    spare = books.config.num_blocks - books.holdings.held
    if pool.free < 0 or pool.evictable < 0 or pool.free + pool.evictable > spare:
        raise InternalError(
            f"the pool offers {pool.free} free and {pool.evictable} cached blocks; the books leave {spare}"
        )
    work = Work(books.copy(), drafts or {})
    work.books.available = pool.free + pool.evictable - books.reserved
    end_requests(work, now)
    plan_decodes(work)
    plan_starts(work, match)
    plan_prefills(work)
    return work.plan(pool), work.books
