"""Text to token ids and back, and what a client must know to do without the model's files.

Owns: /tokenize, /detokenize and /tokenizer_info. Must not know: the engine, other routes.

vLLM and llama.cpp use the same paths with other names: a text is `prompt` there and `content` here.
Either is read as its own server reads it, and the answer has the names of both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BeforeValidator, Field

from .asking import Addressed
from .errors import refused
from .fields import FieldRules, Refused
from .generate import ignored_header, read_request
from .schema import Message, TemplateArguments, check_token_id
from .service import Service, chat_prompt

RULES = FieldRules(
    {
        "chat_template": Refused("the template is chosen when the server starts"),
        "tools": Refused("tools are not supported here", ([],)),
        "return_tokens_as_token_ids": Refused("use return_token_strs", (False,)),
    }
)


class TokenizeRequest(Addressed):
    RULES: ClassVar[FieldRules] = RULES

    prompt: str | None = None
    content: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    parse_special: bool = True
    return_token_strs: bool = False
    with_pieces: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: TemplateArguments = TemplateArguments()

    def check(self) -> None:
        given = [n for n in ("prompt", "content", "messages") if getattr(self, n) is not None]
        if len(given) != 1:
            raise refused("give one of prompt, content and messages", param="prompt")
        if self.messages is not None and (self.add_special_tokens or self.add_special):
            reason = "the template writes the special tokens of messages"
            raise refused(f"add_special_tokens: {reason}", param="add_special_tokens")

    @property
    def adds_special(self) -> bool:
        asked = [self.add_special_tokens, self.add_special, self.prompt is not None]
        return next(choice for choice in asked if choice is not None)


def _ids(value: Any) -> Any:
    if not isinstance(value, list) or not all(type(token_id) is int for token_id in value):
        raise ValueError("must be a list of token ids")
    return value


class DetokenizeRequest(Addressed):
    tokens: Annotated[list[Any], BeforeValidator(_ids, json_schema_input_type=list[int])]


def tokenized(service: Service, request: TokenizeRequest) -> dict[str, Any]:
    request.check()
    ids, tokenizer = _ids_of(service, request), service.tokenizer
    strings = [tokenizer.token_text(id_) for id_ in ids] if request.return_token_strs else None
    tokens: list[Any] = [_piece(service, id_) for id_ in ids] if request.with_pieces else ids
    return {
        "count": len(ids),
        "max_model_len": service.context,
        "tokens": tokens,
        "token_strs": strings,
    }


def _ids_of(service: Service, request: TokenizeRequest) -> list[int]:
    if request.messages is None:
        text = request.prompt if request.content is None else request.content
        assert text is not None
        special = {"add_special": request.adds_special, "parse_special": request.parse_special}
        return service.tokenizer.encode(text, **special)
    messages = [message.model_dump() for message in request.messages]
    prompt = chat_prompt(
        service,
        messages,
        effort=request.chat_template_kwargs.effort or (None, ""),
        instead="prompt",
        continues=request.continue_final_message,
        add_generation_prompt=request.add_generation_prompt,
    )
    return prompt.ids


def _piece(service: Service, token_id: int) -> dict[str, Any]:
    """Its text, or its bytes where they are no whole characters."""
    raw = service.tokenizer.token_bytes(token_id, special=True)
    try:
        return {"id": token_id, "piece": raw.decode("utf-8")}
    except UnicodeDecodeError:
        return {"id": token_id, "piece": list(raw)}


def detokenized(service: Service, request: DetokenizeRequest) -> dict[str, Any]:
    for token_id in request.tokens:
        check_token_id(token_id, service.tokenizer.vocab_size, "tokens")
    text = service.tokenizer.decode(request.tokens, special=True)
    return {"prompt": text, "content": text}


def tokenizer_info(service: Service) -> dict[str, Any]:
    """Names as tokenizer_config.json has them."""
    tokenizer = service.tokenizer

    def name(token_id: int | None) -> str | None:
        return None if token_id is None else tokenizer.token_text(token_id)

    return {
        "tokenizer_class": "GGUFTokenizer",
        "bos_token": name(tokenizer.bos_id),
        "eos_token": name(tokenizer.eos_id),
        "pad_token": name(tokenizer.pad_id),
        "add_bos_token": tokenizer.add_bos,
        "add_eos_token": tokenizer.add_eos,
        "end_of_generation_tokens": [name(token_id) for token_id in sorted(tokenizer.eog_ids)],
        "chat_template": None if service.template is None else service.template.source,
        "model_max_length": service.context,
        "vocab_size": tokenizer.vocab_size,
    }


Answer = Callable[[Service, Any], dict[str, Any]]
ROUTES: dict[str, tuple[type[Addressed], Answer]] = {
    "/tokenize": (TokenizeRequest, tokenized),
    "/detokenize": (DetokenizeRequest, detokenized),
}
INFO = "/tokenizer_info"


def add_routes(app: FastAPI, service: Service) -> None:
    for path, (kind, answer) in ROUTES.items():
        app.post(path, response_model=None)(_endpoint(service, kind, answer))

    @app.get(INFO)
    async def info() -> dict[str, Any]:
        return tokenizer_info(service)


def _endpoint(service: Service, kind: type[Addressed], answer: Answer) -> Callable[..., Any]:
    def work(body: bytes) -> JSONResponse:
        request, ignored = read_request(service, kind, body)
        return JSONResponse(answer(service, request), headers=ignored_header(ignored))

    async def endpoint(request: Request) -> JSONResponse:
        return await asyncio.to_thread(work, await request.body())

    return endpoint
