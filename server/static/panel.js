// The live figures: of the last answer, and of the server. Knows nothing of conversations.

import { getJson } from "./api.js";

const BUSY_MS = 1000;
const IDLE_MS = 5000;
const STATES = { ready: "ok", unloaded: "" };  // one that is not loaded comes when it is asked
const BINDS = { memory: "memory", multiply: "multiplying" };
const query = (model) => (model ? `?model=${encodeURIComponent(model)}` : "");
const at = (id) => document.getElementById(id);

// milliseconds -> "84 ms", "1.92 s"
export function duration(ms) {
  if (ms == null) return ["–", ""];
  return ms < 1000 ? [ms.toFixed(0), "ms"] : [(ms / 1000).toFixed(ms < 10_000 ? 2 : 1), "s"];
}

export function rate(perSecond) {
  return perSecond == null ? "–" : perSecond.toFixed(perSecond < 10 ? 2 : 1);
}

// While an answer comes, the browser's own clock; once it is there, the server's figures.
export function showFigures({ ttftMs, perSecond, nPrompt, nCached, nOutput, seed }) {
  const [value, unit] = duration(ttftMs);
  at("ttft").replaceChildren(value, " ", small(unit));
  at("rate").textContent = rate(perSecond);
  at("n-prompt").replaceChildren(...count(nPrompt));
  at("n-cached").replaceChildren(...count(nCached));
  at("n-output").replaceChildren(...count(nOutput));
  at("seed-used").textContent = seed ?? "–";
  at("seed-used").title = seed ?? "";
}

function small(text) {
  const made = document.createElement("small");
  made.textContent = text;
  return made;
}

function marks(percentiles) {
  if (percentiles?.p50 == null) return ["–"];
  const [half, unit] = duration(percentiles.p50);
  const [most, unitOfMost] = duration(percentiles.p95);
  const between = unit === unitOfMost ? [" / "] : [" ", small(unit), " / "];
  return [half, ...between, most, " ", small(unitOfMost)];
}

const count = (n) => (n == null ? ["–"] : [n.toLocaleString("en"), " ", small(n === 1 ? "token" : "tokens")]);

export class ServerPanel {
  #timer = 0;
  #isBusy = false;
  #before = null;

  // model: the one that is looked at, "" for the only one. onFacts: called with each report.
  // onRefused: the server wants a key.
  constructor({ key, model, onFacts, onRefused }) {
    this.key = key;
    this.model = model;
    this.onFacts = onFacts;
    this.onRefused = onRefused;
    document.addEventListener("visibilitychange", () => this.look());
  }

  set busy(isBusy) {
    this.#isBusy = isBusy;
    this.look();
  }

  // Asks at once, and from then on for as long as the page can be seen.
  async look() {
    clearTimeout(this.#timer);
    if (document.hidden) return;
    const mine = (this.#timer = setTimeout(() => this.look(), this.#isBusy ? BUSY_MS : IDLE_MS));
    try {
      const stats = await getJson(`stats${query(this.model())}`, this.key());
      this.#show(stats);
      this.onFacts(stats);
    } catch (error) {
      if (mine !== this.#timer) return;  // a newer question is under way
      const isRefused = error.status === 401;
      this.#say(isRefused ? "key needed" : "not reachable", "bad");
      if (isRefused) this.onRefused();
    }
  }

  #show(stats) {
    this.#say(stats.state, STATES[stats.state] ?? "bad");
    at("running").textContent = stats.running ?? 0;
    at("waiting").textContent = stats.waiting ?? 0;
    this.#showSteps(stats);
    const { total, used, cached } = stats.kv_blocks ?? { total: 0, used: 0, cached: 0 };
    at("kv").ariaValueMax = total;
    at("kv").ariaValueNow = used;
    at("kv").firstChild.style.width = `${total ? (100 * used) / total : 0}%`;
    at("kv-text").textContent = `${used} of ${total}` + (cached ? `, ${cached} kept` : "");
    at("kv-text").title = cached ? "Kept: free blocks that still hold a known prefix" : "";
  }

  // Rows per step are of the steps since the look before; a server that was started anew, or another
  // model, counts from the start.
  #showSteps(stats) {
    const before = this.#before?.model === stats.model && this.#before.steps <= stats.steps ? this.#before : {};
    this.#before = stats;
    const steps = stats.steps - (before.steps ?? 0);
    const rows = stats.rows - (before.rows ?? 0);
    if (steps > 0) at("rows").textContent = (rows / steps).toFixed(1);
    const { computed = 0, cached = 0 } = stats.prompt_tokens ?? {};
    at("hits").textContent = computed + cached ? `${Math.round((100 * cached) / (computed + cached))} %` : "–";
    at("ttft-marks").replaceChildren(...marks(stats.recent?.ttft_ms));
    at("tpot-marks").replaceChildren(...marks(stats.recent?.tpot_ms));
    const step = stats.last_step;
    const perSecond = (n) => (step ? rate(n / step.seconds / 1e9) : "–");
    at("read").replaceChildren(perSecond(step?.bytes), " ", small(step ? "GB/s" : ""));
    at("multiplied").replaceChildren(perSecond(step?.int8_macs + step?.f32_macs), " ", small(step ? "GMAC/s" : ""));
    at("binds-row").hidden = !step?.binds;
    if (step?.binds) at("binds").textContent = `${BINDS[step.binds]}, ${Math.round(100 * step.limit_share)} % of its limit`;
  }

  #say(text, kind) {
    at("state").textContent = text;
    at("state").className = `state ${kind}`;
  }
}
