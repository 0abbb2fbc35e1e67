"""A model behind HTTP: what routes of all dialects need of it.

Owns: Service, Prompt, names the model answers to. Must not know: requests, dialects, sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..runtime.config import Ability
from ..runtime.errors import QueueFull
from ..runtime.grammar import Grammars
from ..runtime.tokenizer import Tokenizer
from .bridge import Courier, EngineLike, Terms
from .chat import ChatTemplate
from .errors import ApiError, refused
from .facts import ModelFacts
from .lifecycle import Lifecycle
from .metrics import Metrics
from .options import ServerOptions
from .tool_formats import GENERIC, ToolFormat
from .tool_telling import told
from .tools import ToolUse

SAID: dict[Ability, str] = {
    "generate": "generate text",
    "embed": "make vectors of texts",
    "rank": "rank texts",
}
ASKED_AT: dict[Ability, str] = {
    "generate": "/v1/completions",
    "embed": "/v1/embeddings",
    "rank": "/v1/rerank",
}


@dataclass(frozen=True)
class Service:
    """A model behind HTTP."""

    engine: EngineLike
    tokenizer: Tokenizer
    template: ChatTemplate | None
    model_name: str
    fingerprint: str
    options: ServerOptions
    metrics: Metrics
    grammars: Grammars
    context: int | None = None
    max_unfinished: int | None = None
    """Requests the engine takes; with so many it refuses the next."""
    stays: bool = True
    """The model is there for as long as the server is, whatever requests say of it."""
    adapters: tuple[str, ...] = ()
    """Names of the model's adapters, by their numbers: a request to such a name gets all of it."""
    facts: ModelFacts = field(default_factory=ModelFacts)
    courier: Courier = field(default_factory=Courier)
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    last_step: Callable[[], dict[str, Any] | None] = lambda: None
    """As of load.py; None where nobody knows the engine's steps."""

    @property
    def state(self) -> str:
        """ "ready", or why no answer would come now."""
        if not self.engine.is_alive:
            return "dead"
        if self.lifecycle.is_draining:
            return "draining"
        return "full" if self.is_full else "ready"

    @property
    def n_unfinished(self) -> int:
        now = self.engine.stats()
        return int(now.running + now.waiting)

    @property
    def is_full(self) -> bool:
        return self.max_unfinished is not None and self.n_unfinished >= self.max_unfinished

    def check_room(self) -> None:
        """Raises QueueFull where one more request would be refused: before its body is read or its
        prompt cut into tokens, so that those who run pay little for those who are refused."""
        if self.max_unfinished is not None and (n := self.n_unfinished) >= self.max_unfinished:
            raise QueueFull(
                f"{n} requests are unfinished, the most accepted; try again later",
                unfinished=n,
                limit=self.max_unfinished,
            )

    def check_alive(self) -> None:
        """Raises ApiError when nobody is there to answer."""
        if not self.engine.is_alive:
            message = "the engine thread has ended; the server's log says why; restart it"
            raise ApiError(503, message, "unavailable_error", code="engine_dead")

    def check_able(self, ability: Ability) -> None:
        """Raises ApiError for a model that is not made for what is asked."""
        if ability not in self.facts.abilities:
            others = " or ".join(ASKED_AT[other] for other in sorted(self.facts.abilities))
            message = f"the model {self.model_name!r} does not {SAID[ability]}; use {others}"
            raise refused(message, param="model", code="model_not_able")

    @property
    def names(self) -> tuple[str, ...]:
        return (self.model_name, *self.options.model_aliases, *self.adapters)

    def adapted(self, terms: Terms, name: str | None) -> Terms:
        """With the adapter that the request is addressed to, unless it says itself what it gets."""
        known = self._known_name(name)
        if terms.adapters is not None or known not in self.adapters:
            return terms
        return terms._replace(adapters={self.adapters.index(known): 1.0})

    @property
    def tool_format(self) -> ToolFormat:
        return self.template.tool_format if self.template else GENERIC

    def check_name(self, name: str | None) -> None:
        """Raises ApiError 404 for a model that is not served here; None asks for any."""
        if name is not None and self._known_name(name) is None:
            raise self.unknown_model()

    def _known_name(self, name: str | None) -> str | None:
        """Which of its names this is; None: another model's."""
        # Ollama's clients may add a tag to a name without one.
        spellings = () if name is None else (name, name.removesuffix(":latest"))
        return next((spelling for spelling in spellings if spelling in self.names), None)

    def unknown_model(self) -> ApiError:
        message = f"the model is not served here; this server has {self.model_name!r}"
        return ApiError(404, message, param="model", code="model_not_found")


@dataclass(frozen=True)
class Prompt:
    """A prompt's ids, and its text where it is to be echoed."""

    ids: list[int]
    echo: str = ""
    thinks: bool | None = None
    """Whether the answer begins within its reasoning; None: its text is not to be split."""


def chat_prompt(
    service: Service,
    messages: Sequence[Mapping[str, Any]],
    *,
    effort: tuple[str | None, str] = (None, ""),
    instead: str = "/v1/completions",
    splits: bool = True,
    continues: bool = False,
    use: ToolUse | None = None,
    **kwargs: Any,
) -> Prompt:
    """A conversation as the model's own template writes it.

    use: tools to show to the model, in its template or in a system message.
    effort: how much reasoning, an Effort or None, and the field that says so.
    instead: where a model without a template can be asked. splits: reasoning from the answer.
    """
    template = service.template
    if template is None:
        raise refused(f"this model has no chat template; use {instead}", code="no_template")
    if use:
        form = template.tool_format
        messages = told([dict(message) for message in messages], use.functions, form)
        if form.shown == "template":
            kwargs["tools"] = use.for_template
    arguments = {**template.thinking.arguments(*effort), **kwargs}
    ids, opens = template.prompt(messages, continues=continues, **arguments)
    may_think = splits and not continues and template.thinking.shows
    return Prompt(ids, thinks=opens if may_think else None)
