"""/openapi.json: every route is in it, with its body; and a stranger reads it as OpenAPI 3.1."""

from __future__ import annotations

import json
from typing import Any

import httpx
from fastapi.routing import APIRoute
from jsonschema import Draft202012Validator
from martlet.server import create_app
from martlet.server.openapi import ANSWERS, like

from .api_doc import KINDS, honoured
from .scripted_engine import ScriptedEngine
from .serving import assert_refused, chat_body, serving


def test_every_route_is_described(client: httpx.Client) -> None:
    engine = ScriptedEngine()
    app = create_app(engine, engine.tokenizer, model_name="tiny")
    known = {route.path_format for route in app.routes if isinstance(route, APIRoute)}
    document = client.get("/openapi.json").json()
    apart = {"/", "/static/{name}", "/openapi.json"}
    refused_whole = {path for path in known if path.startswith("/api/")} - ANSWERS.keys()
    assert document["paths"].keys() == known - apart - refused_whole
    assert ANSWERS.keys() <= known
    for path, answer in ANSWERS.items():
        (operation,) = document["paths"][path].values()
        schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
        assert schema["required"] == list(answer)


def test_bodies_have_the_fields_of_the_tables(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    for path, kind in KINDS.items():
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        name = body["schema"]["$ref"].removeprefix("#/components/schemas/")
        fields = document["components"]["schemas"][name]["properties"]
        assert {field.partition(".")[0] for field in honoured(kind)} <= fields.keys()


def test_references_lead_somewhere_and_schemas_are_valid(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    text = json.dumps(document)
    for part in text.split('"#/components/schemas/')[1:]:
        assert part.partition('"')[0] in schemas
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)


def test_common_requests_are_valid_by_it(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    bodies: tuple[tuple[str, Any], ...] = (
        ("/v1/chat/completions", chat_body("hi", stop="x", logit_bias={"5": 1})),
        ("/v1/chat/completions", chat_body([{"type": "text", "text": "hi"}], stop=["x"])),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": [97, 98]}),
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/v1/completions", {"prompt": [[97], [98]]}),
        ("/v1/responses", {"model": "tiny", "input": "hi"}),
        ("/api/chat", {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}),
    )
    for path, body in bodies:
        content = document["paths"][path]["post"]["requestBody"]["content"]
        schema = {**content["application/json"]["schema"], "components": document["components"]}
        assert list(Draft202012Validator(schema).iter_errors(body)) == [], (path, body)
        assert client.post(path, json=body).status_code == 200


def test_it_needs_the_key() -> None:
    with serving(ScriptedEngine(), api_keys=("k",)) as client:
        assert_refused(client.get("/openapi.json"), 401)
        assert client.get("/openapi.json", headers={"x-api-key": "k"}).status_code == 200


def test_likeness_is_exact() -> None:
    schema = Draft202012Validator(like({"error": {"message": "", "code": None}}))
    assert schema.is_valid({"error": {"message": "m", "code": None}})
    for bad in ({}, {"error": {"message": None, "code": ""}}, {"error": {"message": "m"}}):
        assert not schema.is_valid(bad)
