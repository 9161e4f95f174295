"""The application around the text routes: models, health, keys, ids, unknown paths, bugs."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from paceline.serve.app import create_app
from paceline.serve.fake import FakeEngine
from paceline.serve.routes import Front
from paceline.serve.speculation import SpeculationInfo
from paceline.types import SpeculationStats

from .http_support import MODEL, make_front


def ask(front: Front, method: str, path: str, **options: Any) -> httpx.Response:
    async def scenario() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(front), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **options)

    return asyncio.run(scenario())


def test_models() -> None:
    front = make_front()
    model = {
        "id": MODEL,
        "object": "model",
        "created": 1,
        "owned_by": "paceline",
        "max_model_len": 1000,
    }
    assert ask(front, "GET", "/v1/models").json() == {"object": "list", "data": [model]}
    assert ask(front, "GET", f"/v1/models/{MODEL}").json() == model
    missing = ask(front, "GET", "/v1/models/org/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"
    assert "org/other" in missing.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_health(path: str) -> None:
    engine = FakeEngine()
    front = make_front(engine)
    assert ask(front, "GET", path).status_code == 200
    engine.die("killed")
    dead = ask(front, "GET", path)
    assert (dead.status_code, dead.json()["error"]["code"]) == (503, "engine_dead")
    starting = ask(make_front(model=None), "GET", path)
    assert (starting.status_code, starting.json()["error"]["code"]) == (503, "engine_starting")


def test_speculation() -> None:
    said = SpeculationStats(
        depth=3, budget=6, reason="static", attempts=(6, 4), accepted=(3, 1), recent=(0.5, 0.25)
    )
    engine = FakeEngine(tokens_per_step=4, drafts_per_step=3, speculation=said)
    info = SpeculationInfo(algorithm="EAGLE3", policy="static", draft_model="/models/eagle")
    front = make_front(engine, speculation=info, api_key="k")
    key = {"authorization": "Bearer k"}
    ask(
        front,
        "POST",
        "/v1/completions",
        json={"model": MODEL, "prompt": "hi", "max_tokens": 8},
        headers=key,
    )
    response = ask(front, "GET", "/v1/speculation", headers=key)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert response.json() == {
        "algorithm": "EAGLE3",
        "policy": "static",
        "draft_model": "/models/eagle",
        "shape": {"depth": 3, "branching": 1, "budget": 6},
        "reason": "static",
        "acceptance": {
            "attempts": [6, 4],
            "accepted": [3, 1],
            "share": [0.5, 0.25],
            "recent": [0.5, 0.25],
        },
        "drafted_tokens": 6,
        "accepted_tokens": 6,
        "drafter_failures": 0,
        "suspect": False,
        "synthetic_acceptance": None,
        "shapes": [],
        "prediction": {
            "steps": 0,
            "predicted_seconds": 0.0,
            "real_seconds": 0.0,
            "error_median": None,
            "error_p90": None,
        },
        "reliability": [],
    }


def test_speculation_needs_a_key_and_an_engine() -> None:
    path = "/v1/speculation"
    keyed = make_front(api_key="k")
    assert ask(keyed, "GET", path).status_code == 401
    assert ask(keyed, "GET", path, headers={"authorization": "Bearer x"}).status_code == 401
    starting = ask(make_front(model=None), "GET", path)
    assert (starting.status_code, starting.json()["error"]["code"]) == (503, "engine_starting")
    engine = FakeEngine()
    front = make_front(engine)
    assert ask(front, "GET", path).json()["algorithm"] == "NONE"
    engine.die("killed")
    dead = ask(front, "GET", path)
    assert (dead.status_code, dead.json()["error"]["code"]) == (503, "engine_dead")


def test_metrics() -> None:
    front = make_front()
    ask(front, "POST", "/v1/completions", json={"model": MODEL, "prompt": "hi"})
    page = ask(front, "GET", "/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    assert 'paceline_requests_total{status="200"} 1.0' in page.text
    assert "paceline_committed_tokens_total 16.0" in page.text


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1/models/", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
        ("POST", "/v1/speculation", 405),
        ("GET", "/v1/speculation/", 404),
    ],
)
def test_wrong_paths_and_methods(method: str, path: str, status: int) -> None:
    response = ask(make_front(), method, path)
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert ("allow" in response.headers) == (status == 405)


def test_every_response_has_an_id_of_its_own() -> None:
    front = make_front(api_key="k")
    ids = {
        ask(front, method, path).headers["x-request-id"]
        for method, path in [("GET", "/health"), ("GET", "/nothing"), ("POST", "/v1/completions")]
    }
    assert len(ids) == 3


def test_keys() -> None:
    front = make_front(api_key="sécret")

    def status(path: str, authorization: str | None = None) -> int:
        sent = {} if authorization is None else {"authorization": authorization.encode()}
        return ask(front, "GET", path, headers=sent).status_code

    assert status("/v1/models", "Bearer sécret") == 200
    assert status("/v1/models", "bearer sécret") == 200
    for wrong in (None, "", "Bearer", "Bearer ", "Bearer other", "Basic sécret", "sécret"):
        assert status("/v1/models", wrong) == 401
    assert status("/v1/nothing") == 401
    assert status("/health") == status("/metrics") == 200
    refused = ask(front, "POST", "/v1/completions", json={"model": MODEL, "prompt": "hi"})
    assert refused.json()["error"]["code"] == "invalid_api_key"
    assert refused.headers["www-authenticate"] == "Bearer"
    assert 'paceline_requests_total{status="401"}' in front.metrics.text().decode()


def test_no_cors_headers() -> None:
    response = ask(make_front(), "GET", "/v1/models", headers={"origin": "http://evil.example"})
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_a_bug_is_a_500_without_details(monkeypatch: pytest.MonkeyPatch) -> None:
    front = make_front()

    def broken(*args: object) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(front, "draw_seed", broken)
    response = ask(front, "POST", "/v1/completions", json={"model": MODEL, "prompt": "hi"})
    assert response.status_code == 500
    assert response.json()["error"] == {
        "message": "internal error",
        "type": "server_error",
        "param": None,
        "code": None,
    }
