// The live page: reads the states of /admin/live and shows them.

import { html, render, useEffect, useReducer, useRef, useState } from "./vendor/htm-preact.js";
import { History } from "./history.js";
import { Now } from "./now.js";
import { Playground } from "./playground.js";
import { Memory, Policies } from "./policies.js";
import { call, events, setKey } from "./server.js";
import { Timeline } from "./timeline.js";

const RETRY_MS = 1000;
const TABS = ["Now", "Timeline", "Policies", "Memory", "Playground"];

// Read states until the signal is aborted; a server with several HTTP processes sends one for each request.
async function watch(signal, onState, onError) {
  while (!signal.aborted) {
    try {
      const reply = await call("admin/live", { headers: { accept: "text/event-stream" }, signal });
      if (reply.headers.get("content-type").startsWith("text/event-stream")) {
        for await (const state of events(reply)) onState(state);
        onError(new Error("the server has ended the stream"));
      } else onState(await reply.json());
    } catch (error) {
      if (signal.aborted) return;
      onError(error);
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

function KeyForm({ onKey }) {
  const field = useRef();
  const save = (event) => {
    event.preventDefault();
    setKey(field.current.value);
    onKey();
  };
  return html`<form onSubmit=${save} class="controls">
    <label>Key <input ref=${field} type="password" autocomplete="off" required /></label>
    <button>Use</button></form>`;
}

function App() {
  const [state, setState] = useState(null), [error, setError] = useState(null);
  const [tab, setTab] = useState("Now"), [attempt, again] = useReducer((count) => count + 1, 0);
  const history = useRef(new History()).current;
  useEffect(() => {
    const leaving = new AbortController();
    let current = null;
    const onState = (next) => {
      history.add(next);
      setError(null);
      setState(next);
    };
    // A hidden page costs the server nothing.
    const start = () => {
      if (current) current.abort();
      current = document.hidden ? null : new AbortController();
      if (current) watch(current.signal, onState, setError);
    };
    start();
    document.addEventListener("visibilitychange", start, { signal: leaving.signal });
    return () => { leaving.abort(); if (current) current.abort(); };
  }, [attempt]);
  const onKeys = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = TABS[(TABS.indexOf(tab) + step + TABS.length) % TABS.length];
    setTab(next);
    document.getElementById(`tab-${next}`).focus();
  };
  // The playground stays, with its answer, while another view is shown.
  const pages = { Now, Timeline, Policies, Memory }, Page = pages[tab];
  return html`
    <header>
      <h1>vsched</h1>
      <span>${state && state.model}</span>
      <span role="status" class=${error || (state && state.state !== "ready") ? "bad" : "faint"}>
        ${error ? `no connection: ${error.message}` : state ? state.state : "connecting"}</span>
      <div role="tablist" aria-label="Views" onKeyDown=${onKeys}>
        ${TABS.map((name) => html`<button role="tab" id=${`tab-${name}`} aria-selected=${String(name === tab)}
          aria-controls="view" tabindex=${name === tab ? 0 : -1} onClick=${() => setTab(name)}>${name}</button>`)}
      </div>
    </header>
    <main id="view" role="tabpanel" aria-labelledby=${`tab-${tab}`} tabindex="-1">
      ${error && (error.status === 401 || error.status === 403) && html`<${KeyForm} onKey=${again} />`}
      ${state && Page && html`<${Page} state=${state} history=${history} />`}
      ${state && html`<div hidden=${tab !== "Playground"}><${Playground} state=${state} /></div>`}
    </main>`;
}

render(html`<${App} />`, document.getElementById("app"));
