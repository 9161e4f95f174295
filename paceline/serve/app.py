"""The whole HTTP application: routes, authentication, request ids, errors in OpenAI's form.

    GET  /v1/models, /v1/models/{id}        POST /v1/completions, /v1/chat/completions
    GET  /v1/speculation
    GET  /health, /ready, /metrics          (no API key is needed from here on)
    GET  /, /stats                          the dashboard and its figures

Knows starlette. Knows nothing of processes, sockets or how text is made (`paceline.serve.routes`).
"""

from __future__ import annotations

import hmac
import http
import uuid

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.errors import InvalidRequest, ModelNotFound, RequestError, Unauthorized
from paceline.serve import dashboard
from paceline.serve.asgi import JSON, header, send_error
from paceline.serve.metrics import CONTENT_TYPE
from paceline.serve.responses import model_body, model_list, openai_error
from paceline.serve.routes import Front, TextEndpoint
from paceline.serve.speculation import speculation_body


def create_app(front: Front) -> ASGIApp:
    """The application around `front`, whose `model` may be set later."""
    routes = _Plain(front)
    app = Starlette(
        routes=[
            Route("/v1/completions", TextEndpoint(front, "completion"), methods=["POST"]),
            Route("/v1/chat/completions", TextEndpoint(front, "chat"), methods=["POST"]),
            Route("/v1/models", routes.models, methods=["GET"]),
            Route("/v1/models/{model:path}", routes.model, methods=["GET"]),
            Route("/v1/speculation", routes.speculation, methods=["GET"]),
            Route("/health", routes.health, methods=["GET"]),
            Route("/ready", routes.health, methods=["GET"]),
            Route("/metrics", routes.metrics, methods=["GET"]),
            Route("/", routes.dashboard, methods=["GET"]),
            Route("/stats", routes.stats, methods=["GET"]),
        ],
        exception_handlers={
            HTTPException: _on_http_error,
            RequestError: _on_request_error,
            Exception: _on_bug,
        },
    )
    app.router.redirect_slashes = False
    return _Gateway(app, front)


class _Plain:
    """The routes that generate nothing."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def models(self, request: Request) -> Response:
        return _json(model_list([self._model()]))

    async def model(self, request: Request) -> Response:
        body = self._model()
        name = request.path_params["model"]
        if name != body["id"]:
            raise ModelNotFound(
                f"the model {name!r} does not exist here; this server has {body['id']!r}",
                param="model",
                code="model_not_found",
            )
        return _json(body)

    async def speculation(self, request: Request) -> Response:
        front = self._front
        front.serving()
        return _json(speculation_body(front.speculation, front.engine.stats))

    async def health(self, request: Request) -> Response:
        self._front.serving()
        return _json({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        return Response(self._front.metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def dashboard(self, request: Request) -> Response:
        return Response(dashboard.PAGE, media_type="text/html", headers=dashboard.HEADERS)

    async def stats(self, request: Request) -> Response:
        front = self._front
        body = dashboard.stats_body(front.serving().name, front.speculation, front.engine.stats)
        return Response(
            msgspec.json.encode(body), media_type=JSON, headers={"cache-control": "no-store"}
        )

    def _model(self) -> dict[str, object]:
        model = self._front.serving()
        return model_body(model.name, model.created, model.max_model_len)


class _Gateway:
    """Outermost: gives every request its id (the response's `x-request-id`), checks the key."""

    def __init__(self, app: ASGIApp, front: Front) -> None:
        self._app = app
        self._front = front
        self._key = None if front.api_key is None else front.api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        id_header = (b"x-request-id", request_id.encode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], id_header]
            await send(message)

        if self._may_pass(scope):
            await self._app(scope, receive, send_with_id)
            return
        self._front.metrics.count(Unauthorized.status)
        error = Unauthorized(
            "a valid API key is needed: send it as 'Authorization: Bearer KEY'",
            code="invalid_api_key",
        )
        await send_error(send_with_id, error)

    def _may_pass(self, scope: Scope) -> bool:
        if self._key is None or not scope["path"].startswith("/v1"):
            return True
        scheme, _, key = (header(scope, b"authorization") or b"").partition(b" ")
        return hmac.compare_digest(key.strip(), self._key) and scheme.lower() == b"bearer"


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type=JSON)


def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    status, body, headers = openai_error(error)
    return Response(body, status, headers=headers, media_type=JSON)


def _on_http_error(request: Request, error: Exception) -> Response:
    """Starlette's own errors: no such path, wrong method."""
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    said = {404: f"there is nothing at {path}", 405: f"{path} does not take {method}"}
    fallback = http.HTTPStatus(error.status_code).phrase
    mapped = InvalidRequest(said.get(error.status_code, fallback))
    _, body, headers = openai_error(mapped)
    return Response(
        body, error.status_code, headers={**headers, **(error.headers or {})}, media_type=JSON
    )


def _on_bug(request: Request, error: Exception) -> Response:
    """A fault of ours: the client learns no details; the server logs the exception."""
    status, body, headers = openai_error(RequestError("internal error"))
    return Response(body, status, headers=headers, media_type=JSON)
