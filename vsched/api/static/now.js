// What runs and what waits: figures, charts, groups, queues, memory maps and requests.

import { html, useState } from "./vendor/htm-preact.js";
import { Chart, MemoryMap } from "./charts.js";

const PHASES = {
  items: "waits for embeddings", ready: "waits in the queue", preempted: "preempted", suspended: "waits for its group",
  prompt: "waits for a shared prompt", prefill: "prefill", decode: "decode", held: "held on arrival",
  preparing: "is prepared",
};
const WAITING = new Set(["items", "ready", "preempted", "suspended", "prompt", "held"]);

export function seconds(s) {
  return s >= 100 ? `${Math.round(s)} s` : s >= 1 ? `${s.toFixed(1)} s` : `${Math.round(s * 1e3)} ms`;
}

function percentile(values, part) {
  if (!values.length) return "–";
  const sorted = [...values].sort((a, b) => a - b);
  return seconds(sorted[Math.min(sorted.length - 1, Math.floor(part * sorted.length))] / 1e3);
}

function Tiles({ state, history }) {
  const { running = 0, waiting = 0, generate = {}, finished = {} } = state.counters;
  const done = state.ended.filter((one) => one.finish_reason === "stop" || one.finish_reason === "length");
  const first = done.map((one) => one.preprocess_ms + one.encode_ms + one.queue_ms + one.prefill_ms);
  const between = done.filter((one) => one.output_tokens > 1).map((one) => one.decode_ms / (one.output_tokens - 1));
  const latest = history.points[history.points.length - 1] || {};
  const asked = (generate.tokens_cached || 0) + (generate.tokens_prefilled || 0);
  const tiles = [
    ["running", `${running} of ${generate.slots_total ?? 0}`],
    ["waiting", waiting],
    ["output tokens/s", Math.round(latest.output || 0)],
    ["prompt tokens/s", Math.round(latest.prompt || 0)],
    ["first token p50", percentile(first, 0.5)],
    ["first token p95", percentile(first, 0.95)],
    ["between tokens p50", percentile(between, 0.5)],
    ["between tokens p95", percentile(between, 0.95)],
    ["prefix cache hits", asked ? `${Math.round((100 * generate.tokens_cached) / asked)} %` : "–"],
    ["preemptions", generate.preemptions ?? 0],
    ["finished", (finished.stop || 0) + (finished.length || 0)],
    ["failed", finished.error || 0],
  ];
  return html`<dl class="tiles">${tiles.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
    <p class="faint">Percentiles of the last ${done.length} requests that finished.</p>`;
}

function reasonOf(row) {
  const why = row.why.includes(": ") ? row.why.slice(row.why.indexOf(": ") + 2) : row.why;
  return why.split(" Remedy: ");
}

// The waiting requests by remedy, with the reason of the oldest.
function Waits({ state }) {
  const waits = new Map();
  for (const row of state.requests.filter((one) => WAITING.has(one.phase))) {
    const [reason, remedy] = reasonOf(row), found = waits.get(remedy) || { reason, row, count: 0 };
    found.count += 1;
    waits.set(remedy, found);
  }
  if (!waits.size) return null;
  return html`<section><h2 id="waits">Why requests wait</h2><ul aria-labelledby="waits">
    ${[...waits].map(([remedy, { reason, row, count }]) => html`<li key=${remedy}><strong>${count}</strong>
      ${" "}${count > 1 ? "requests" : "request"}${row.since_ns ? `, the oldest for ${seconds((state.now_ns - row.since_ns) / 1e9)}` : ""}:
      ${" "}${reason}
      ${remedy && html` <strong>What would help:</strong> ${remedy}.`}</li>`)}</ul></section>`;
}

function Request({ row, now }) {
  const [open, setOpen] = useState(false);
  const since = row.since_ns ? (now - row.since_ns) / 1e9 : null;
  const [reason, remedy] = reasonOf(row);
  return html`<tr>
      <th scope="row"><button class="row" aria-expanded=${String(open)} onClick=${() => setOpen(!open)}>
        ${row.request_id}</button></th>
      <td>${row.tenant || "–"}</td>
      <td><span class=${`phase ${row.phase}`}>${PHASES[row.phase] || row.phase}</span></td>
      <td class="number">${since == null ? "" : seconds(since)}</td>
      <td class="number">${row.computed}/${row.prompt_tokens}</td>
      <td class="number">${row.outputs}/${row.max_tokens}</td>
      <td class="number">${row.images || ""}</td>
      <td class="number">${row.slot >= 0 ? row.slot : ""}</td>
      <td class="number">${row.blocks || ""}</td>
    </tr>
    ${open && html`<tr class="why"><td colspan="9">
      <p>${since == null ? "" : `For ${seconds(since)}: `}${reason}</p>
      ${remedy && html`<p><strong>What would help:</strong> ${remedy}</p>`}
      <p class="faint">Group ${row.group || "–"}, priority ${row.priority}, preemptions
        ${" "}${row.preemptions}, cached prompt tokens ${row.cached_tokens}.</p></td></tr>`}`;
}

function Requests({ state }) {
  const [filter, setFilter] = useState("all");
  const rows = state.requests.filter((row) => filter === "all" || WAITING.has(row.phase) === (filter === "waiting"));
  return html`<h2 id="requests">Requests</h2>
    <div class="controls"><label>Show <select value=${filter} onChange=${(event) => setFilter(event.target.value)}>
      <option value="all">all</option><option value="waiting">waiting</option><option value="running">running</option>
    </select></label><span class="faint">${rows.length} of ${state.requests_total}; choose one for why it waits</span></div>
    <div class="scroll"><table aria-labelledby="requests"><thead><tr><th scope="col">request</th>
      <th scope="col">tenant</th><th scope="col">phase</th><th scope="col" class="number">since</th>
      <th scope="col" class="number">prompt</th><th scope="col" class="number">output</th>
      <th scope="col" class="number">images</th><th scope="col" class="number">slot</th>
      <th scope="col" class="number">blocks</th></tr></thead>
      <tbody>${rows.map((row) => html`<${Request} key=${row.request_id} row=${row} now=${state.now_ns} />`)}</tbody>
    </table></div>`;
}

function Groups({ groups }) {
  return html`<h2 id="groups">Groups</h2><div class="scroll"><table aria-labelledby="groups"><thead><tr>
    <th scope="col">group</th><th scope="col">state</th><th scope="col" class="number">running</th>
    <th scope="col" class="number">waiting</th><th scope="col" class="number">computed for</th>
    <th scope="col" class="number">ranks</th><th scope="col" class="number">restarts</th><th scope="col">last loss</th>
    </tr></thead><tbody>${groups.map((group) => html`<tr key=${group.name}><th scope="row">${group.name}</th>
      <td class=${group.state === "up" ? "" : "bad"}>${group.state}</td>
      <td class="number">${group.running}</td><td class="number">${group.waiting}</td>
      <td class="number">${seconds(group.busy_ms / 1e3)}</td><td class="number">${group.ranks.length}</td>
      <td class="number">${group.restarts}</td>
      <td>${group.last_loss ? `${group.last_loss.reason} (${group.last_loss.at})` : "–"}</td></tr>`)}</tbody></table></div>`;
}

function Queues({ tenants }) {
  const rows = Object.entries(tenants).sort((a, b) => b[1].waiting - a[1].waiting);
  return html`<section><h2 id="queues">Queues by tenant</h2>
    ${rows.length ? html`<table aria-labelledby="queues"><thead><tr><th scope="col">tenant</th>
      <th scope="col" class="number">running</th><th scope="col" class="number">waiting</th></tr></thead>
      <tbody>${rows.map(([name, one]) => html`<tr key=${name}><th scope="row">${name || "(none)"}</th>
        <td class="number">${one.running}</td><td class="number">${one.waiting}</td></tr>`)}</tbody></table>`
    : html`<p class="faint">No requests.</p>`}</section>`;
}

function Slots({ state }) {
  const total = state.counters.generate?.slots_total || 0, taken = state.requests.filter((row) => row.slot >= 0);
  const groups = Object.keys(state.kv), each = total / Math.max(groups.length, 1);
  const cells = groups.flatMap((group) => Array.from({ length: each }, (_, slot) => {
    const row = taken.find((one) => one.group === group && one.slot === slot);
    return [row && row.phase === "decode" ? 100 : 0, row && row.phase !== "decode" ? 100 : 0];
  }));
  const totals = [0, 1].map((index) => cells.filter((cell) => cell[index]).length);
  const map = { count: total, per_cell: 1, states: ["decode", "prefill"], totals, cells };
  return html`<${MemoryMap} title="Slots" map=${map} />`;
}

export function Now({ state, history }) {
  const { points } = history;
  return html`<${Tiles} state=${state} history=${history} />
    <div class="charts">
      <${Chart} title="Tokens per second" points=${points} series=${[
        { key: "output", label: "output", colour: "decode" }, { key: "prompt", label: "prompt", colour: "prefill" }]} />
      <${Chart} title="Requests" points=${points} series=${[
        { key: "running", label: "running", colour: "decode" }, { key: "waiting", label: "waiting", colour: "bad" }]} />
    </div>
    <${Waits} state=${state} />
    <${Groups} groups=${state.groups} />
    <div class="maps">
      <${Slots} state=${state} />
      ${Object.entries(state.kv).map(([group, map]) => html`<${MemoryMap} key=${group} title=${`KV blocks of ${group}`} map=${map} />`)}
      ${state.pages && html`<${MemoryMap} title="Embedding pages" map=${state.pages} />`}
      <${Queues} tenants=${state.tenants} />
    </div>
    <${Requests} state=${state} />`;
}
