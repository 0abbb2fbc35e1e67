// Talks to the server: JSON, and answers as server-sent events. Knows no DOM.

// Relative, so that the page also works behind a proxy that puts it under a path.
const CHAT = "v1/chat/completions";
const COMPLETION = "v1/completions";

export class ServerError extends Error {
  constructor(message, { status = 0, code = null, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter;
  }
}

export async function getJson(path, key) {
  const response = await request(path, { headers: headers(key), cache: "no-store" });
  return response.json();
}

// Calls take(event) for each JSON event; returns after [DONE]. Throws ServerError, and AbortError
// when `signal` ends it.
export async function stream(body, { key, signal, isChat }, take) {
  const response = await request(isChat ? CHAT : COMPLETION, {
    method: "POST",
    headers: { ...headers(key), "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ServerError(event.error.message, { code: event.error.code });
    take(event);
  }
  throw new ServerError("The connection ended in the middle of the answer.");
}

function headers(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function request(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached. Is it still running?");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const retryAfter = Number(response.headers.get("retry-after")) || null;
  let told = null;
  try {
    told = (await response.json()).error;
  } catch { /* not ours: a proxy's page, say */ }
  const message = told?.message ?? `The server answered ${response.status} without a reason.`;
  return new ServerError(message, { status: response.status, code: told?.code, retryAfter });
}

// The data of each event. Comments (pings) and empty lines are passed over.
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) yield line.slice(5).trim();
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
