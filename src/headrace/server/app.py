"""`create_app`: routers, guards and errors put together."""

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from headrace import __version__
from headrace.server import errors
from headrace.server.guards import Guards
from headrace.server.routes import chat, completions, health, messages, models, ops, page, responses, tokens, xray
from headrace.server.state import ServerState

ROUTERS = (
    health.router,
    ops.router,
    models.router,
    tokens.router,
    completions.router,
    chat.router,
    responses.router,
    messages.router,
    page.router,
    xray.router,
)
"""Every router of the server, in the order in which paths are looked up."""


def create_app(state: ServerState) -> FastAPI:
    """Return the application that answers from a state."""
    app = FastAPI(
        title="headrace",
        version=__version__,
        docs_url=None,  # both pages would load scripts from elsewhere
        redoc_url=None,
    )
    app.state.headrace = state
    for router in ROUTERS:
        app.include_router(router)
    errors.install(app)
    app.add_middleware(Guards, settings=state.settings, on_failure=state.metrics.failed)
    if state.settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(state.settings.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["authorization", "content-type", "x-api-key"],
            expose_headers=["x-request-id"],
        )
    return app
