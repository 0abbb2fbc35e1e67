"""A model with its engine, opened for one command, and one request streamed from it.
Owns the hop from the engine's thread to the caller's; must not know what the text is for."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from martlet.quant.errors import MartletError
from martlet.scripts.console import byte_progress, note
from martlet.scripts.models import find_model
from martlet.scripts.scored_text import read_text

if TYPE_CHECKING:
    from martlet.runtime.draft_words import ChoiceOfWords
    from martlet.runtime.drafts import Drafter
    from martlet.runtime.engine import Engine
    from martlet.runtime.events import Event, FinishEvent
    from martlet.runtime.model import Model
    from martlet.runtime.sampling_params import SamplingParams
    from martlet.runtime.vocabulary import WritableVocabulary


@contextlib.contextmanager
def open_model(spec: str, **load_options: Any) -> Iterator[Model]:
    """The model `spec` names, fetched if need be, loaded, and closed at the end.
    Options are load_model's, but for kv_type, activations, lora and speculate: words of the command
    line."""
    from martlet.runtime.adapters import AdapterFile
    from martlet.runtime.machine import allowed_cpus, choose_threads
    from martlet.runtime.model import load_model
    from martlet.runtime.ops import ACTIVATIONS, KvType
    from martlet.runtime.speculation import most_guesses

    threads = load_options.get("threads")
    if threads is not None and threads > len(allowed_cpus()):
        note(f"warning: {threads} threads {choose_threads(threads).reason}")
    adapters = [AdapterFile.parse(text) for text in load_options.pop("lora", None) or ()]
    kv_type = KvType[load_options.pop("kv_type", "f16").upper()]
    activations = ACTIVATIONS[load_options.pop("activations", "int8")]
    if (speculate := load_options.pop("speculate", None)) is not None:
        load_options["guesses"] = most_guesses(speculate)
    with byte_progress() as progress:
        path = find_model(spec, progress=progress)
    model = load_model(
        path, kv_type=kv_type, activations=activations, adapters=adapters, **load_options
    )
    try:
        yield model
    finally:
        model.close()


@contextlib.contextmanager
def open_engine(
    model: Model,
    speculate: str = "off",
    draft: str | None = None,
    rule: str = "match",
    draft_vocab: str | None = None,
) -> Iterator[Engine]:
    from martlet.runtime.engine import Engine
    from martlet.runtime.nextn_drafter import own_drafter
    from martlet.runtime.speculation import speculation_of

    shares = [adapter.share for adapter in model.adapters]
    with open_drafter(model, draft, speculate, draft_vocab) as drafter:
        drafter = drafter or own_drafter(model, speculate)
        speculation = speculation_of(
            speculate, model.executor, drafter=drafter, n_adapters=len(shares), rule=rule
        )
        engine = Engine(
            model.executor,
            model.tokenizer,
            context=model.context,
            adapters=shares,
            speculation=speculation,
            timeline=model.timeline,
        )
        engine.start()
        try:
            yield engine
        finally:
            engine.close()


def check_draft(draft: str | None, speculate: str, draft_vocab: str | None = None) -> None:
    """Before a model is opened: raises MartletError where something is said of guesses and they
    are off, and what words_of raises."""
    words_of(draft_vocab)
    if speculate != "off":
        return
    for option, value in (("--draft", draft), ("--draft-vocab", draft_vocab)):
        if value:
            raise MartletError(
                f"{option} guesses nothing with --speculate off; say auto, or how many"
            )


@contextlib.contextmanager
def open_drafter(
    model: Model, spec: str | None, speculate: str = "auto", draft_vocab: str | None = None
) -> Iterator[Drafter | None]:
    """The model `spec` names, to guess what `model` says; with draft_vocab, as of words_of, also
    the model's own block. None: nothing of the kind."""
    from martlet.runtime.draft_model import DraftModel
    from martlet.runtime.nextn_drafter import own_drafter

    words = words_of(draft_vocab)
    if spec is None:
        own = own_drafter(model, speculate, words(model.tokenizer)) if words else None
        if words and own is None:
            raise MartletError(
                "--draft-vocab is for what guesses by an output matrix: say --draft MODEL, or take "
                "a file with a block that guesses"
            )
        yield own
        return
    executor = model.executor
    alike = {"executor": executor.name, "threads": getattr(executor, "n_threads", None)}
    alike |= {"context": model.context, "gives_back": False, "words": words}
    alike |= {"repack": getattr(executor, "repack", None)}
    with open_model(spec, **alike) as small:
        yield DraftModel(small, model.tokenizer)


def words_of(draft_vocab: str | None) -> ChoiceOfWords | None:
    """N, or N:FILE with a text to count tokens in. Raises MartletError."""
    from martlet.runtime.draft_words import Words, frequent_words

    if draft_vocab is None:
        return None
    count, _, path = draft_vocab.partition(":")
    if not count.isdecimal():
        raise MartletError(f"--draft-vocab is {draft_vocab!r}, expected N or N:FILE")
    try:
        text = read_text(Path(path)) if path else ""
    except OSError as error:
        raise MartletError(f"--draft-vocab names {path}: {error.strerror}") from None

    def choose(vocabulary: WritableVocabulary) -> Words:
        ids = vocabulary.encode(text, add_special=False, parse_special=False)
        return frequent_words(vocabulary, int(count), ids)

    return choose


def stream(
    engine: Engine,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    on_text: Callable[[str], None],
) -> FinishEvent:
    """Passes text on as it comes. The first Ctrl-C ends the request, a second one the program."""
    from martlet.runtime.errors import ModelError
    from martlet.runtime.events import FinishEvent

    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    request = engine.submit(prompt_ids, params, events.put)
    is_cancelled = False
    while True:
        try:
            event = events.get()
            on_text(event.text)
        except BaseException as error:
            engine.cancel(request.id)
            if is_cancelled or not isinstance(error, KeyboardInterrupt):
                raise
            is_cancelled = True
            continue
        if isinstance(event, FinishEvent):
            if event.reason == "error":
                raise ModelError(event.error or "the model failed without a reason")
            return event


def prompt_ids(model: Model, text: str, *, chat: bool, system: str | None = None) -> list[int]:
    """Raw text, or one user message in the model's chat template."""
    if not chat:
        return model.tokenizer.encode(text, add_special=True, parse_special=False)
    return chat_ids(model, [*system_message(system), {"role": "user", "content": text}])


def system_message(system: str | None) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}] if system else []


def chat_ids(model: Model, messages: Sequence[dict[str, str]]) -> list[int]:
    from martlet.server.chat import render_chat

    return render_chat(chat_template(model), messages, tokenizer=model.tokenizer)


def chat_template(model: Model) -> str:
    from martlet.runtime.errors import UnsupportedError

    template = model.tokenizer.chat_template
    if template is None:
        raise UnsupportedError(
            f"{model.config.name} has no chat template; `martlet run` without --chat completes text"
        )
    return template
