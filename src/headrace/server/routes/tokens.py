"""`/tokenize` and `/detokenize`: between text and token ids, as the model sees them."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field

from headrace.core.errors import UserError
from headrace.server.schemas.body import Body
from headrace.server.schemas.completions import TokenId
from headrace.server.state import state_of
from headrace.text.tokenizer import Tokenizer

router = APIRouter(tags=["tokens"])


class TokenizeRequest(Body):
    """A text to encode."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = Field(default=True, description="begin with the begin token, as completions do")
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    """Ids to decode."""

    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool = False


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> dict[str, Any]:
    """Return the ids of a text."""
    state = state_of(request)
    state.check_model(body.model)
    tokenizer = _tokenizer(state.llm.tokenizer)
    ids = await asyncio.to_thread(tokenizer.encode, body.prompt)
    begin = state.llm.config.bos_token_id
    if body.add_special_tokens and ids[:1] != [begin]:
        ids = [begin, *ids]
    found: dict[str, Any] = {"count": len(ids), "max_model_len": state.llm.max_context, "tokens": ids}
    if body.return_token_strs:
        found["token_strs"] = [tokenizer.id_to_token(token_id) for token_id in ids]
    return found


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, Any]:
    """Return the text of ids."""
    state = state_of(request)
    state.check_model(body.model)
    tokenizer = _tokenizer(state.llm.tokenizer)
    text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=body.skip_special_tokens)
    return {"prompt": text}


def _tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise UserError("the checkpoint has no tokenizer.json, so only token ids are accepted", param="prompt")
    return tokenizer
