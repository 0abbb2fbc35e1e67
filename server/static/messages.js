// The conversation as it is shown: one element per message. Knows no server.

import { element, render } from "./markdown.js";

const log = document.getElementById("log");
const scroller = document.getElementById("scroller");
const NEAR_PX = 80;

// Follows what is new only while the reader is at the end.
export function atEnd() {
  return scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR_PX;
}

export function toEnd() {
  scroller.scrollTop = scroller.scrollHeight;
}

export function clear() {
  log.replaceChildren();
}

export function addUser(text) {
  const body = element("div", "body", text);
  body.dir = "auto";
  const whole = element("article", "message user", body);
  whole.setAttribute("aria-label", "You");
  log.append(whole);
}

export class Answer {
  #shown = "";
  #frame = 0;

  constructor() {
    this.text = "";
    this.body = element("div", "text");
    this.body.dir = "auto";
    this.foot = element("div", "foot");
    this.whole = element("article", "message answer", this.body, this.foot);
    this.whole.setAttribute("aria-label", "Answer");
    log.append(this.whole);
  }

  wait() {
    const dots = element("i", "", element("b"));
    dots.setAttribute("aria-hidden", "true");
    this.body.replaceChildren(element("span", "waiting", dots, "reading the prompt"));
  }

  // What a model says before its answer stands apart, folded away once the answer begins.
  think(text) {
    if (!this.thinking) {
      this.thinking = element("div");
      this.fold = element("details", "thinking", element("summary", "", "Reasoning"), this.thinking);
      this.fold.open = true;
      this.whole.insertBefore(this.fold, this.body);
      this.body.replaceChildren();
    }
    const follows = atEnd();
    this.thinking.append(text);
    if (follows) toEnd();
  }

  // At most one layout per frame, however fast the text comes.
  add(text) {
    if (this.fold && !this.text) this.fold.open = false;
    this.text += text;
    this.#frame ||= requestAnimationFrame(() => this.#draw());
  }

  #draw() {
    this.#frame = 0;
    if (this.#shown === this.text) return;
    const follows = atEnd();
    this.#shown = this.text;
    render(this.body, this.text);
    if (follows) toEnd();
  }

  // note: "stopped", figures; buttons: [label, action] pairs.
  finish(note, buttons) {
    cancelAnimationFrame(this.#frame);
    const follows = atEnd();
    this.#draw();
    if (!this.text) this.body.replaceChildren(element("p", "waiting", "(no text)"));
    const acts = element("span", "acts");
    this.foot.replaceChildren(...(note ? [element("span", "note", note)] : []), acts);
    for (const [label, act] of buttons) {
      const button = element("button", "small", label);
      button.type = "button";
      button.addEventListener("click", () => act(button));
      acts.append(button);
    }
    if (follows) toEnd();
  }

  fail(title, reason, retry) {
    this.finish("", [["Try again", retry]]);
    if (!this.text) this.body.replaceChildren();
    const box = element("div", "error", element("strong", "", title), element("span", "", reason));
    box.setAttribute("role", "alert");
    this.whole.insertBefore(box, this.foot);
    toEnd();
  }

  remove() {
    cancelAnimationFrame(this.#frame);
    this.whole.remove();
  }
}

// Where there is no clipboard (plain HTTP from elsewhere), the old way.
export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = element("textarea", "unseen");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    button.focus();
  }
  const label = button.textContent;
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = label; }, 1200);
}

log.addEventListener("click", (event) => {
  const button = event.target.closest("[data-copy]");
  if (button) copy(button.closest(".block").querySelector("pre").textContent, button);
});
