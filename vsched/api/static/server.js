// Calls of the server, and its streams.

const KEY = "vsched-key";
const base = new URL("../", import.meta.url); // the prefix of a proxy is kept

export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

// Call a path of the server with the key, if one was given.
export async function call(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  const reply = await fetch(new URL(path, base), { ...options, headers });
  if (reply.ok) return reply;
  const body = await reply.json().catch(() => ({}));
  throw Object.assign(new Error(body.error?.message || `status ${reply.status}`), { status: reply.status });
}

// Yield the data of server-sent events.
export async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const data = part.slice(part.indexOf("data: ") + 6);
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}
