// What the person has chosen: sampling controls, the key. Knows where each is kept.

const KEPT = "martlet.settings";
const KEY = "martlet.key";
const DEFAULTS = { temperature: "0.7", top_p: "0.95", max_tokens: "", seed: "", system: "" };
const form = document.getElementById("settings");
const keyField = document.getElementById("key-field");
const keyInput = document.getElementById("key");

// Storage may be full or forbidden; then choices last as long as the page.
export function keep(storage, name, value) {
  try {
    storage().setItem(name, value);
  } catch { /* see above */ }
}

export function kept(storage, name) {
  try {
    return storage().getItem(name);
  } catch {
    return null;
  }
}

export function startSettings(onKey) {
  let saved = {};
  try {
    saved = JSON.parse(kept(() => localStorage, KEPT)) ?? {};
  } catch { /* of another version */ }
  fill({ ...DEFAULTS, ...saved });
  form.addEventListener("input", (event) => {
    showValues();
    if (event.target !== keyInput) keep(() => localStorage, KEPT, JSON.stringify(values()));
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  document.getElementById("reset").addEventListener("click", () => {
    fill(DEFAULTS);
    keep(() => localStorage, KEPT, JSON.stringify(DEFAULTS));
  });
  keyInput.value = kept(() => sessionStorage, KEY) ?? "";
  keyInput.addEventListener("change", () => {
    keep(() => sessionStorage, KEY, keyInput.value);
    onKey();
  });
  if (keyInput.value) askForKey();
}

export const key = () => keyInput.value.trim();

export function askForKey() {
  keyField.hidden = false;
}

// The request fields of the choices, or null when a number is not one; the field then has the focus.
export function sampling() {
  if (!form.reportValidity()) return null;
  const { temperature, top_p, max_tokens, seed } = values();
  const fields = { temperature: Number(temperature), top_p: Number(top_p) };
  if (max_tokens) fields.max_tokens = Number(max_tokens);
  if (seed) fields.seed = Number(seed);
  return fields;
}

export const system = () => values().system.trim();

function values() {
  return Object.fromEntries(Object.keys(DEFAULTS).map((name) => [name, form.elements[name].value]));
}

function fill(chosen) {
  for (const name of Object.keys(DEFAULTS)) form.elements[name].value = chosen[name];
  showValues();
}

function showValues() {
  for (const output of form.querySelectorAll("output")) {
    const value = Number(form.elements[output.htmlFor.value].value);
    output.value = value.toFixed(2);
  }
}
