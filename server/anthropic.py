"""Anthropic's dialect: its conversations as prompts, and counting them.

Owns: paths under /v1/messages. Must not know: the engine, how answers are written.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI, Request

from .anthropic_schema import Conversation, CountRequest, MessagesRequest
from .anthropic_writer import AnthropicWriter
from .errors import refused
from .generate import Route, read_request
from .service import Prompt, Service, chat_prompt


def prompts(service: Service, request: Conversation) -> list[Prompt]:
    messages = request.for_template()
    # An assistant's message at the end is the beginning of the answer.
    continues = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    if continues and request.form:
        field = request.form.field
        raise refused(f"{field}: such an answer begins anew; end with a user's message", field)
    if continues and not messages[-1]["content"]:
        raise refused("messages: the last one is empty, so there is nothing to continue")
    prompt = chat_prompt(
        service,
        messages,
        effort=effort(service, request),
        continues=continues,
        use=request.tool_use,
    )
    return [prompt]


def effort(service: Service, request: Conversation) -> tuple[str | None, str]:
    if request.thinking:
        return ("none" if request.thinking.type == "disabled" else "medium"), "thinking"
    # Not to ask for thinking is to have none, where the model can do without.
    can_switch = service.template is not None and service.template.thinking.switches
    return ("none" if can_switch else None), "thinking"


ROUTES = {"/v1/messages": Route(MessagesRequest, prompts, AnthropicWriter, "msg_")}
COUNT_TOKENS = "/v1/messages/count_tokens"
KINDS = {COUNT_TOKENS: CountRequest}
"""Bodies of what generates nothing."""


def add_routes(app: FastAPI, service: Service) -> None:
    @app.post(COUNT_TOKENS)
    async def count_tokens(request: Request) -> dict[str, Any]:
        body = await request.body()

        def count() -> int:
            asked, _ = read_request(service, CountRequest, body)
            assert isinstance(asked, CountRequest)
            [prompt] = prompts(service, asked)
            return len(prompt.ids)

        return {"input_tokens": await asyncio.to_thread(count)}
