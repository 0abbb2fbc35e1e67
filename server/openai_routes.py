"""OpenAI's dialects, chat completions, completions and responses: their requests as prompts.

Owns: ROUTES. Must not know: the engine, HTTP.
"""

from __future__ import annotations

from functools import partial

from .errors import refused
from .generate import Route
from .infill import infill_ids
from .openai_writer import OpenAiWriter
from .responses_schema import ResponsesRequest
from .responses_writer import ResponsesWriter
from .schema import ChatRequest, CompletionRequest, check_token_id
from .service import Prompt, Service, chat_prompt
from .shapes import CHAT, COMPLETION


def chat_prompts(service: Service, request: ChatRequest) -> list[Prompt]:
    messages = [message.model_dump() for message in request.messages]
    continues = request.continue_final_message
    if continues and not (messages[-1]["role"] == "assistant" and messages[-1]["content"]):
        reason = "continue_final_message: the last message is not the assistant's, or is empty"
        raise refused(reason, param="continue_final_message")
    if continues and request.form:
        reason = f"continue_final_message: an answer with {request.form.field} begins anew"
        raise refused(reason, param="continue_final_message")
    prompt = chat_prompt(
        service,
        messages,
        effort=request.effort,
        splits=request.reasoning_format != "none",
        continues=continues,
        use=request.tool_use,
        add_generation_prompt=request.add_generation_prompt,
    )
    return [prompt]


def completion_prompts(service: Service, request: CompletionRequest) -> list[Prompt]:
    tokenizer = service.tokenizer
    prompts = []
    if request.suffix and request.echo:
        raise refused("echo: a prompt with a suffix is not echoed", param="echo")
    for given in request.prompt:
        if not isinstance(given, str):
            for token_id in given:
                check_token_id(token_id, tokenizer.vocab_size, "prompt")
        if request.suffix:
            prompts.append(Prompt(infill_ids(tokenizer, given, request.suffix)))
        elif isinstance(given, str):
            ids = tokenizer.encode(given, add_special=True, parse_special=True)
            prompts.append(Prompt(ids, given if request.echo else ""))
        else:
            prompts.append(Prompt(given, tokenizer.decode(given) if request.echo else ""))
    return prompts


def response_prompts(service: Service, request: ResponsesRequest) -> list[Prompt]:
    effort = (request.reasoning.effort, "reasoning.effort")
    use = request.tool_use
    return [chat_prompt(service, request.for_template(), effort=effort, use=use)]


ROUTES = {
    "/v1/chat/completions": Route(
        ChatRequest, chat_prompts, partial(OpenAiWriter, CHAT), "chatcmpl-"
    ),
    "/v1/completions": Route(
        CompletionRequest, completion_prompts, partial(OpenAiWriter, COMPLETION), "cmpl-"
    ),
    "/v1/responses": Route(ResponsesRequest, response_prompts, ResponsesWriter, "resp_"),
}
