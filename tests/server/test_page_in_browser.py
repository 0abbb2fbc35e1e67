"""The page in headless Chromium, against a real server. Skipped where there is no browser."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from martlet.runtime.sampling_params import SamplingParams

from .scripted_engine import CHATML, ScriptedEngine, byte_tokenizer, says
from .serving import serving, wait_until
from .test_shelf import Models
from .test_shelf import serving as serving_models

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
if CHROMIUM is None:
    pytest.skip(f"no browser: none of {', '.join(BROWSERS)}", allow_module_level=True)
playwright_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright_api.expect
LIMIT_MS = 60_000  # only a page that hangs takes so long, however busy the machine
expect.set_options(timeout=LIMIT_MS)

QUIET = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
)
WIDE, NARROW = {"width": 1280, "height": 800}, {"width": 360, "height": 740}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield browser
        browser.close()


@contextmanager
def opened(
    browser: Any, engine: ScriptedEngine, *, page_options: Any = None, **options: Any
) -> Iterator[Any]:
    """The page over this engine; a script error or a breach of the policy fails the test."""
    with serving(engine, **options) as client:
        context = browser.new_context(viewport=WIDE, **(page_options or {}))
        context.set_default_timeout(LIMIT_MS)
        page, wrong = context.new_page(), []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda m: wrong.append(m.text) if "Policy" in m.text else None)
        page.goto(str(client.base_url))
        try:
            yield page
            assert not wrong
        finally:
            context.close()


def ask(page: Any, text: str) -> Any:
    """Sends it by the keyboard; gives the answer's element."""
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")
    return page.locator(".answer").last


def test_a_conversation(browser: Any) -> None:
    engine = ScriptedEngine(says("It is **so**."))
    with opened(browser, engine) as page:
        expect(page.locator("#state")).to_have_text("ready")
        expect(page.locator("#model-name")).to_have_text("tiny")
        answer = ask(page, "is it so?")
        expect(answer.locator(".text")).to_have_text("It is so.")
        expect(answer.locator("strong")).to_have_text("so")
        expect(answer.locator(".note")).to_contain_text("14 tokens")
        expect(page.locator("#n-output")).to_have_text("14 tokens")
        expect(page.locator("#ttft")).to_have_text(re.compile(r"[\d.]+ m?s"))
        expect(page.locator("#seed-used")).to_have_text("77")
        expect(ask(page, "and now?").locator(".note")).to_be_visible()
        # The second request holds the first exchange, Markdown as the model wrote it.
        prompt = engine.tokenizer.decode(engine.requests[1].prompt_ids, special=True)
        assert "is it so?" in prompt
        assert "It is **so**." in prompt
        page.reload()
        expect(page.locator(".message")).to_have_count(4)
        page.get_by_role("button", name="New chat").click()
        expect(page.locator(".message")).to_have_count(0)
        expect(page.get_by_text("Ask something.")).to_be_visible()


def test_choices_reach_the_engine(browser: Any) -> None:
    engine = ScriptedEngine()
    with opened(browser, engine) as page:
        page.get_by_label("Temperature").fill("0.5")
        page.get_by_label("Top p").fill("0.8")
        page.get_by_label("Max tokens").fill("3")
        page.get_by_label("Seed").fill("5")
        page.get_by_label("System prompt").fill("Be brief.")
        expect(ask(page, "hi").locator(".note")).to_contain_text("cut at the limit")
        params = engine.requests[0].params
        assert (params.temperature, params.top_p, params.max_tokens) == (0.5, 0.8, 3)
        assert params.seed == 5
        prompt = engine.tokenizer.decode(engine.requests[0].prompt_ids)
        assert prompt.index("Be brief.") < prompt.index("hi")
        page.reload()
        expect(page.get_by_label("System prompt")).to_have_value("Be brief.")


@pytest.mark.parametrize("way", ["button", "key"])
def test_stop_ends_the_request_and_keeps_the_text(browser: Any, way: str) -> None:
    engine = ScriptedEngine(says("go on ", end=False), token_s=0.02)
    with opened(browser, engine) as page:
        answer = ask(page, "hi")
        expect(answer.locator(".text")).to_contain_text("go on")
        if way == "button":
            page.get_by_role("button", name="Stop").click()
        else:
            page.keyboard.press("Escape")
        expect(answer.locator(".note")).to_have_text("stopped")
        expect(answer.locator(".text")).to_contain_text("go on")
        wait_until(lambda: engine.n_unfinished == 0)
        assert engine.requests[0].reason == "cancelled"
        expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_a_full_server_is_told_in_words_and_asked_again(browser: Any) -> None:
    engine = ScriptedEngine(slots=1, max_queue=0)
    with opened(browser, engine) as page:
        engine.unpaused.clear()
        other = engine.submit([65], SamplingParams(), lambda event: None)
        ask(page, "hi")
        alert = page.get_by_role("alert")
        expect(alert).to_contain_text("The server is busy")
        expect(alert).to_contain_text("Try again in 1 s.")
        engine.cancel(other.id)
        wait_until(lambda: engine.n_unfinished == 0)
        engine.unpaused.set()
        page.get_by_role("button", name="Try again").click()
        expect(page.locator(".answer .text")).to_have_text("hello")
        expect(alert).to_have_count(0)
        expect(page.locator(".message.user")).to_have_count(1)


def test_a_failure_in_mid_answer_keeps_what_came(browser: Any) -> None:
    with opened(browser, ScriptedEngine(says("half of it"), fail_at=4)) as page:
        answer = ask(page, "hi")
        expect(page.get_by_role("alert")).to_contain_text("The answer broke off")
        expect(page.get_by_role("alert")).to_contain_text("Scripted fault")
        expect(answer.locator(".text")).to_have_text("half")


def test_the_page_asks_for_the_key(browser: Any) -> None:
    with opened(browser, ScriptedEngine(), api_keys=("sk-1",)) as page:
        expect(page.locator("#state")).to_have_text("key needed")
        page.get_by_label("API key").fill("sk-1")
        page.get_by_label("API key").press("Tab")
        expect(page.locator("#state")).to_have_text("ready")
        expect(ask(page, "hi").locator(".text")).to_have_text("hello")


def test_a_base_model_continues_text(browser: Any) -> None:
    engine = ScriptedEngine(tokenizer=byte_tokenizer(template=None))
    with opened(browser, engine) as page:
        expect(page.get_by_text("continues your text")).to_be_visible()
        expect(ask(page, "Once").locator(".text")).to_have_text("hello")
        assert engine.tokenizer.decode(engine.requests[0].prompt_ids) == "Once"


HOSTILE = """<img src=x onerror="document.title='hit'"><script>document.title='hit'</script>
[a](javascript:alert(1)) ![p](https://evil.example/p.png) [b](https://good.example/)

```html
<b onclick=x>
```
"""


def test_text_of_a_model_is_never_html(browser: Any) -> None:
    with opened(browser, ScriptedEngine(says(HOSTILE))) as page:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        answer = ask(page, "<b>hi</b>")
        expect(answer.locator(".note")).to_be_visible()
        expect(page.locator(".message.user .body")).to_have_text("<b>hi</b>")
        text = answer.locator(".text")
        expect(text).to_contain_text("<img src=x onerror=")
        expect(text.locator("img, script, b")).to_have_count(0)
        links = [link.get_attribute("href") for link in text.locator("a").all()]
        assert links == ["https://evil.example/p.png", "https://good.example/"]
        expect(text.locator("pre")).to_have_text("<b onclick=x>")
        assert not any("evil" in url for url in asked)
        assert page.title() == "tiny · martlet"


MARKDOWN = """# Title

One *em* `co*d*e` snake_case_name 2 * 3 * 4.

- a
  - b
- c

3. three
4. four

> quoted

| x | y |
|---|---|
| 1 | 2 |

```py
unfinished
"""


def test_markdown_that_models_write(browser: Any) -> None:
    with opened(browser, ScriptedEngine(says(MARKDOWN))) as page:
        text = ask(page, "hi").locator(".text")
        expect(page.locator(".note")).to_be_visible()
        expect(text.locator("h3")).to_have_text("Title")
        expect(text.locator("em")).to_have_text(["em"])
        expect(text.locator("p code")).to_have_text("co*d*e")
        expect(text).to_contain_text("snake_case_name 2 * 3 * 4.")
        expect(text.locator("ul > li > ul > li")).to_have_text("b")
        expect(text.locator("> ul > li")).to_have_count(2)
        expect(text.locator("ol")).to_have_attribute("start", "3")
        expect(text.locator("ol li")).to_have_text(["three", "four"])
        expect(text.locator("blockquote")).to_have_text("quoted")
        expect(text.locator("td")).to_have_text(["1", "2"])
        expect(text.locator("pre")).to_have_text("unfinished")


def luminance(color: str) -> float:
    red, green, blue = (int(part) for part in re.findall(r"\d+", color)[:3])
    return (0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_it_fits_any_screen(browser: Any, scheme: str, size: dict[str, int]) -> None:
    long_line = "word " * 60 + "x" * 300 + "\n\n```\n" + "y" * 300 + "\n```\n"
    options = {"color_scheme": scheme}
    with opened(browser, ScriptedEngine(says(long_line)), page_options=options) as page:
        page.set_viewport_size(size)
        expect(ask(page, "hi").locator(".note")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        assert page.evaluate("document.documentElement.scrollHeight") <= size["height"]
        box = page.get_by_label("Message").bounding_box()
        assert box["y"] + box["height"] <= size["height"]
        paper, ink = page.evaluate(
            "[getComputedStyle(document.body).backgroundColor,getComputedStyle(document.body).color]"
        )
        assert abs(luminance(paper) - luminance(ink)) > 0.7
        assert (luminance(paper) < 0.5) == (scheme == "dark")
        temperature = page.get_by_label("Temperature")
        if size is NARROW:
            expect(temperature).not_to_be_visible()
            page.get_by_role("button", name="Settings").press("Enter")
            expect(temperature).to_be_visible()
            page.keyboard.press("Escape")
            expect(temperature).not_to_be_visible()
        else:
            expect(temperature).to_be_visible()


def test_reasoning_stands_apart(browser: Any) -> None:
    template = CHATML + "{# <think> </think> #}"
    engine = ScriptedEngine(
        says("<think>let me see</think>four"), tokenizer=byte_tokenizer(template)
    )
    with opened(browser, engine) as page:
        answer = ask(page, "2 + 2?")
        expect(answer.locator(".text")).to_have_text("four")
        expect(answer.locator(".thinking")).to_contain_text("let me see")
        expect(answer.get_by_text("let me see")).not_to_be_visible()
        answer.get_by_text("Reasoning").click()
        expect(answer.get_by_text("let me see")).to_be_visible()


def test_a_model_is_picked_among_several(browser: Any) -> None:
    models = Models()
    with (
        serving_models(models) as client,
        contextlib.closing(browser.new_context(viewport=NARROW)) as context,
    ):
        page = context.new_page()
        page.goto(str(client.base_url))
        page.get_by_label("Model").select_option("b")
        expect(page.locator("#state")).to_have_text("unloaded")
        expect(ask(page, "who?").locator(".text")).to_have_text("I am b")
        expect(page.locator("#state")).to_have_text("ready")
        assert models.open == {"b"}


def test_every_control_has_a_name(browser: Any) -> None:
    with opened(browser, ScriptedEngine()) as page:
        nameless = page.evaluate(
            """[...document.querySelectorAll("button, input, textarea, select, [role=meter]")]
            .filter((e) => !(e.labels?.length || e.textContent.trim()
              || e.getAttribute("aria-label") || e.getAttribute("aria-labelledby")))
            .map((e) => e.outerHTML)"""
        )
        assert nameless == []
