// Ask the model, with an image or a video, and see where the time went.

import { html, useRef, useState } from "./vendor/htm-preact.js";
import { call, events } from "./server.js";
import { seconds } from "./now.js";

const PARTS = [["prepare", "preprocess_ms"], ["encode", "encode_ms"], ["queue", "queue_ms"], ["prefill", "prefill_ms"],
  ["decode", "decode_ms"]];

function readUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

function Times({ row }) {
  if (!row) return null;
  const total = PARTS.reduce((sum, [, field]) => sum + row[field], 0) || 1;
  return html`<h2>Where the time went</h2>
    <div class="share" aria-hidden="true">${PARTS.map(([name, field]) => html`<i class=${`swatch-${name}`}
      style=${{ width: `${(100 * row[field]) / total}%` }}></i>`)}</div>
    <p class="legend">${PARTS.map(([name, field]) => html`<span class=${`swatch-${name}`}>${name} ${seconds(row[field] / 1e3)}</span>`)}</p>
    <p class="faint">${row.prompt_tokens} prompt tokens, ${row.cached_tokens} of them cached, ${row.encoded_items} images
      or frame groups encoded, ${row.output_tokens} output tokens, ended by ${row.finish_reason}.</p>`;
}

export function Playground({ state }) {
  const [text, setText] = useState("What is in this picture?"), [media, setMedia] = useState(null);
  const [most, setMost] = useState(128), [answer, setAnswer] = useState(""), [error, setError] = useState("");
  const [thought, setThought] = useState(""), [sentMs, setSentMs] = useState(0);
  const [id, setId] = useState(""), [over, setOver] = useState(false), running = useRef(null), [busy, setBusy] = useState(false);
  const latest = useRef(null), chooser = useRef(null);
  const found = state.ended.find((one) => one.request_id === id || one.request_id.startsWith(`${id}#`));
  if (found) latest.current = found; // it leaves the list when others end
  const row = latest.current && id && latest.current.request_id.startsWith(id) ? latest.current : null;
  const take = async (file) => {
    setOver(false); setError("");
    const [kind] = file ? file.type.split("/") : [];
    if (kind === "image" || kind === "video") setMedia({ kind, url: await readUrl(file) });
    else if (file) setError(`${file.name} is neither an image nor a video`);
  };
  const forget = () => { chooser.current.value = ""; setMedia(null); };
  const ask = async (event) => {
    event.preventDefault();
    const content = [{ type: "text", text }];
    if (media) content.unshift({ type: `${media.kind}_url`, [`${media.kind}_url`]: { url: media.url } });
    const body = JSON.stringify({ messages: [{ role: "user", content }], max_tokens: most, stream: true });
    setAnswer(""); setThought(""); setError(""); setId(""); setSentMs(Date.now()); setBusy(true);
    running.current = new AbortController();
    try {
      const reply = await call("v1/chat/completions", { method: "POST", body, signal: running.current.signal,
        headers: { "content-type": "application/json" } });
      for await (const chunk of events(reply)) {
        if (chunk.error) throw new Error(chunk.error.message);
        setId(chunk.id);
        const { content: piece, reasoning_content: reasoning } = chunk.choices[0]?.delta || {};
        if (reasoning) setThought((before) => before + reasoning);
        if (piece) setAnswer((before) => before + piece);
      }
    } catch (failure) {
      if (failure.name !== "AbortError") setError(failure.message);
    }
    setBusy(false);
  };
  return html`<div class="two"><form onSubmit=${ask}>
      <h2><label for="prompt">Message</label></h2>
      <textarea id="prompt" value=${text} onInput=${(event) => setText(event.target.value)} required></textarea>
      <div class=${over ? "drop over" : "drop"} onDragOver=${(event) => { event.preventDefault(); setOver(true); }}
        onDragLeave=${() => setOver(false)} onDrop=${(event) => { event.preventDefault(); forget(); take(event.dataTransfer.files[0]); }}>
        <label>Image or video: drop one here, or <input ref=${chooser} type="file" accept="image/*,video/*" onChange=${(event) => take(event.target.files[0])} /></label>
        ${media?.kind === "image" && html`<img src=${media.url} alt="The image of the message" />`}
        ${media?.kind === "video" && html`<video src=${media.url} controls muted aria-label="The video of the message"></video>`}
        ${media && html`<button type="button" onClick=${forget}>Remove</button>`}
      </div>
      <div class="controls"><label>Output tokens at most <input type="number" min="1" max="100000" value=${most}
        onInput=${(event) => setMost(Number(event.target.value))} /></label>
        <button disabled=${busy}>Send</button>
        <button type="button" disabled=${!busy} onClick=${() => running.current.abort()}>Stop</button></div>
    </form>
    <section><h2>Answer</h2>
      ${thought && html`<p class="thought faint">${thought}</p>`}
      <output class="answer" aria-live="polite" aria-busy=${String(busy)}>${answer}</output>
      ${busy && !answer && !thought && html`<p class="faint">Waiting for the first token for
        ${" "}${seconds((Date.now() - sentMs) / 1e3)}.</p>`}
      ${error && html`<p role="alert" class="bad">${error}</p>`}
      <${Times} row=${row} /></section></div>`;
}
