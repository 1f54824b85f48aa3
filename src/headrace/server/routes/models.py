"""`/v1/models`: the one that is served, with its limits, in a shape that both clients read."""

import datetime
from typing import Any

from fastapi import APIRouter, Request

from headrace.server.state import ServerState, state_of

router = APIRouter(tags=["models"])


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """List what is served."""
    state = state_of(request)
    found = _model(state)
    return {"object": "list", "data": [found], "has_more": False, "first_id": state.name, "last_id": state.name}


@router.get("/v1/models/{model:path}", responses={404: {"description": "not served here"}})
async def model(model: str, request: Request) -> dict[str, Any]:
    """Describe one."""
    state = state_of(request)
    state.check_model(model)
    return _model(state)


def _model(state: ServerState) -> dict[str, Any]:
    limit = state.llm.max_context
    created = datetime.datetime.fromtimestamp(int(state.started), tz=datetime.UTC)
    return {
        "id": state.name,
        "object": "model",
        "type": "model",
        "display_name": state.name,
        "created": int(state.started),
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "owned_by": "headrace",
        "max_model_len": limit,
        "context_length": limit,
        "max_output_tokens": limit - 1,
    }
