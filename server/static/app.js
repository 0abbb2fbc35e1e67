// The page: what a click or a key does, and one conversation. The pieces know nothing of each other.

import { getJson, stream } from "./api.js";
import * as view from "./messages.js";
import { ServerPanel, duration, rate, showFigures } from "./panel.js";
import * as settings from "./settings.js";

const at = (id) => document.getElementById(id);
const prompt = at("prompt");
const CONVERSATION = "martlet.conversation";
const REASONS = { 401: "A key is needed", 404: "Not served here", 413: "Too long", 503: "The server is busy" };

let messages = [];      // { role, content }, as the API takes them
let running = null;     // the AbortController of the answer under way
let last = null;        // the Answer shown last
let hasTemplate = true; // without one a model only continues text

const server = new ServerPanel({
  key: settings.key,
  model: () => at("model").value,
  onFacts: showFacts,
  onRefused: askForKey,
});

function showFacts(stats) {
  hasTemplate = stats.has_chat_template !== false;  // not known before a model is loaded
  at("model-name").textContent = at("model").hidden ? stats.model : "";
  const tokens = stats.context?.toLocaleString("en");
  at("context").textContent = tokens ? ` · ${tokens} tokens of context` : "";
  document.title = `${stats.model} · martlet`;
  if (!hasTemplate) {
    at("welcome-text").textContent = "This is a base model without a chat template: it continues your text.";
  }
}

function askForKey() {
  if (at("key-field").hidden) openPanel(true);
  settings.askForKey();
}

async function listModels() {
  try {
    const { data } = await getJson("v1/models", settings.key());
    const chosen = at("model").value;
    at("model").replaceChildren(...data.map(({ id }) => new Option(id, id)));
    if (data.some(({ id }) => id === chosen)) at("model").value = chosen;
    at("model").hidden = data.length < 2;
  } catch { /* the panel says what is wrong */ }
}

// ---- one answer --------------------------------------------------------------------------------

function requestBody(fields) {
  const model = at("model").value ? { model: at("model").value } : {};
  if (!hasTemplate) return { ...fields, ...model, prompt: messages.at(-1).content };
  const first = settings.system() ? [{ role: "system", content: settings.system() }] : [];
  return { ...fields, ...model, messages: [...first, ...messages] };
}

async function ask(text) {
  if (!settings.sampling()) return openPanel(true);
  messages.push({ role: "user", content: text });
  view.addUser(text);
  await answer();
}

async function answer() {
  const fields = settings.sampling();
  if (!fields) return openPanel(true);
  const shown = (last = new view.Answer());
  const clock = new Clock();
  shown.wait();
  view.toEnd();
  setRunning(new AbortController());
  try {
    const options = { key: settings.key(), signal: running.signal, isChat: hasTemplate };
    await stream(requestBody(fields), options, (event) => take(event, shown, clock));
    end(shown, clock.summary());
    say("Answer finished");
  } catch (error) {
    if (error.name === "AbortError") {
      end(shown, "stopped");
      say("Stopped");
    } else {
      fail(shown, error);
    }
  } finally {
    setRunning(null);
    save();
  }
}

function take(event, shown, clock) {
  const choice = event.choices[0];
  const text = choice?.delta?.content ?? choice?.text ?? "";
  const thought = choice?.delta?.reasoning_content ?? "";
  clock.take(event, choice, text || thought);
  if (thought) shown.think(thought);
  if (text) shown.add(text);
}

function end(shown, note) {
  // Also a stopped answer belongs to the conversation: the next question may be about it.
  messages.push({ role: "assistant", content: shown.text });
  shown.finish(note, buttons(shown));
}

const buttons = (shown) => [
  ["Copy", (button) => view.copy(shown.text, button)],
  ["Try again", () => retry(shown)],
];

function fail(shown, error) {
  const wait = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
  const message = error.message.charAt(0).toUpperCase() + error.message.slice(1);
  const title = shown.text ? "The answer broke off" : (REASONS[error.status] ?? "No answer");
  shown.fail(title, message + wait, () => retry(shown));
  if (error.status === 401) askForKey();
}

function retry(shown) {
  if (running || shown !== last) return;
  if (messages.at(-1).role === "assistant") messages.pop();
  shown.remove();
  answer();
}

// Times as the browser sees them, until the server's own figures arrive.
class Clock {
  start = performance.now();
  n = 0;
  figures = {};

  take(event, choice, text) {
    if (text && !this.n) this.first = performance.now();
    this.n += text ? 1 : 0;
    const seconds = (performance.now() - this.first) / 1000;
    if (this.n && !event.timings) {
      this.figures.ttftMs = this.first - this.start;
      this.figures.perSecond = this.n > 1 && seconds > 0 ? (this.n - 1) / seconds : null;
    }
    if (event.timings) {
      this.figures.ttftMs = event.timings.ttft_ms;
      this.figures.perSecond = event.timings.predicted_per_second;
    }
    if (event.usage) {
      this.figures.nPrompt = event.usage.prompt_tokens;
      this.figures.nCached = event.usage.prompt_tokens_details?.cached_tokens;
      this.figures.nOutput = event.usage.completion_tokens;
    }
    if (choice?.seed != null) this.figures.seed = choice.seed;
    if (choice?.finish_reason) this.isCut = choice.finish_reason === "length";
    showFigures(this.figures);
  }

  summary() {
    const { ttftMs, perSecond, nOutput } = this.figures;
    const parts = [`${nOutput} tokens`, `first after ${duration(ttftMs).join(" ")}`];
    if (perSecond) parts.push(`${rate(perSecond)} tokens/s`);
    if (this.isCut) parts.push("cut at the limit");
    return parts.join(" · ");
  }
}

// ---- the page ----------------------------------------------------------------------------------

function setRunning(controller) {
  running = controller;
  server.busy = Boolean(controller);
  at("stop").hidden = !controller;
  at("send").hidden = Boolean(controller);
  showWelcome();
  showSend();
}

const showWelcome = () => { at("welcome").hidden = messages.length > 0; };
const showSend = () => { at("send").disabled = !prompt.value.trim(); };
const say = (text) => { at("status").textContent = text; };
const save = () => settings.keep(() => sessionStorage, CONVERSATION, JSON.stringify(messages));

function stop() {
  if (!running) return;
  running.abort();
  prompt.focus();
}

function submit() {
  const text = prompt.value.trim();
  if (!text || running) return;
  prompt.value = "";
  fitPrompt();
  ask(text);
}

function fitPrompt() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
  showSend();
}

function startOver() {
  stop();
  messages = [];
  last = null;
  view.clear();
  showFigures({});
  save();
  showWelcome();
  prompt.focus();
}

function openPanel(isOpen) {
  document.body.classList.toggle("panel-open", isOpen);
  at("toggle").setAttribute("aria-expanded", isOpen);
  at("veil").hidden = !isOpen;
  if (isOpen && matchMedia("(max-width: 62rem)").matches) at("close").focus();
}

function closePanel() {
  if (!document.body.classList.contains("panel-open")) return false;
  openPanel(false);
  at("toggle").focus();
  return true;
}

// After a reload of the page, the conversation of this tab.
function restore() {
  try {
    messages = JSON.parse(settings.kept(() => sessionStorage, CONVERSATION)) ?? [];
  } catch { /* of another version */ }
  for (const { role, content } of messages) {
    if (role === "user") {
      view.addUser(content);
      continue;
    }
    const shown = (last = new view.Answer());
    shown.add(content);
    shown.finish("", buttons(shown));
  }
  // A question whose answer never came is put back to be asked again.
  if (messages.at(-1)?.role === "user") {
    prompt.value = messages.pop().content;
    document.querySelector("#log > :last-child").remove();
    last = null;
  }
  view.toEnd();
}

at("composer").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
prompt.addEventListener("input", fitPrompt);
prompt.addEventListener("keydown", (event) => {
  const isTouch = matchMedia("(pointer: coarse)").matches;  // there Enter is the only way to a new line
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || isTouch) return;
  event.preventDefault();
  submit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !closePanel()) stop();
});
at("stop").addEventListener("click", stop);
at("model").addEventListener("change", () => server.look());
at("new").addEventListener("click", startOver);
at("toggle").addEventListener("click", () => openPanel(!document.body.classList.contains("panel-open")));
at("close").addEventListener("click", closePanel);
at("veil").addEventListener("click", closePanel);
for (const idea of document.querySelectorAll(".idea")) {
  idea.addEventListener("click", () => { prompt.value = idea.textContent; submit(); });
}

settings.startSettings(() => { server.look(); listModels(); });
restore();
showWelcome();
fitPrompt();
listModels();
server.look();
