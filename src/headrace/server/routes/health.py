"""Is the process there, can it decode a token, and what is it."""

import asyncio
import time
from typing import Any

import numpy as np
from fastapi import APIRouter, Request

from headrace import __version__
from headrace.core.errors import EngineError
from headrace.engine.sampling.params import SamplingParams
from headrace.server import bridge
from headrace.server.state import ServerState, state_of

router = APIRouter(tags=["health"])

_PROBE_S = 10.0
_PRIORITY = 1 << 20


@router.get("/health")
async def health() -> dict[str, Any]:
    """Say that the server's process is there."""
    return {"status": "ok"}


@router.get("/ready", responses={503: {"description": "no token can be decoded now"}})
async def ready(request: Request) -> dict[str, Any]:
    """Decode a token, unless one was decoded just now."""
    state = state_of(request)
    await decode_token(state)
    return {"status": "ready", "model": state.name, "seconds_since_token": round(_age(state), 3)}


@router.get("/version")
async def version(request: Request) -> dict[str, Any]:
    """Say which version serves which model."""
    state = state_of(request)
    return {"version": __version__, "model": state.name, "numerics": state.llm.numerics}


async def decode_token(state: ServerState) -> None:
    """Have the engine decode a token, unless it did within the last seconds.

    Raises:
        EngineError: it did not in time.
    """
    if state.llm.is_up and _age(state) <= state.settings.ready_cache_s:
        return
    ids = np.array([state.llm.config.bos_token_id], dtype=np.int64)
    params = SamplingParams(max_tokens=1, logprobs=False, cache_salt="headrace-ready", priority=_PRIORITY)
    try:
        async with asyncio.timeout(_PROBE_S):
            async for _ in bridge.stream(state, ids, params):
                pass
    except TimeoutError:
        raise EngineError(f"no token was decoded within {_PROBE_S:g} seconds") from None


def _age(state: ServerState) -> float:
    return float("inf") if state.last_token is None else time.monotonic() - state.last_token
