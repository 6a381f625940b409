// The policies in force, with a form to change one, and the memory of all processes.

import { html, useState } from "./vendor/htm-preact.js";
import { call } from "./server.js";

function Change({ policy, onDone }) {
  const [use, setUse] = useState(policy.use), [fields, setFields] = useState("{}"), [error, setError] = useState("");
  const change = async (event) => {
    event.preventDefault();
    try {
      const body = JSON.stringify({ [policy.table]: { use, ...JSON.parse(fields) } });
      await call("admin/policies", { method: "POST", headers: { "content-type": "application/json" }, body });
      onDone(`${use} decides as ${policy.table} from now on`);
    } catch (failure) {
      setError(failure.message);
    }
  };
  return html`<form onSubmit=${change} class="controls">
    <label>Policy <select onChange=${(event) => setUse(event.target.value)}>
      ${[...new Set([...policy.choices, policy.use])].map((name) => html`<option value=${name} selected=${name === use}>
        ${name}</option>`)}</select></label>
    <label>Fields as JSON <input value=${fields} onInput=${(event) => setFields(event.target.value)} /></label>
    <button>Change</button>
    ${error && html`<span role="alert" class="bad">${error}</span>`}</form>`;
}

export function Policies({ state }) {
  const [open, setOpen] = useState(""), [done, setDone] = useState("");
  const finish = (text) => { setDone(text); setOpen(""); };
  return html`<h2 id="policies">Policies in force</h2>
    <p role="status">${done}</p>
    <div class="scroll"><table aria-labelledby="policies"><thead><tr><th scope="col">table</th><th scope="col">policy</th>
      <th scope="col">fields</th><th scope="col" class="number">calls</th><th scope="col" class="number">mean</th>
      <th scope="col" class="number">longest</th><th scope="col" class="number">slow</th>
      <th scope="col" class="number">faults</th><th scope="col">overruled</th><th scope="col"></th></tr></thead>
    <tbody>${state.policies.map((one) => html`<tr key=${one.table}>
      <th scope="row">${one.table}</th>
      <td>${one.use}${one.replaced && html`<div class="bad">The default decides: ${one.replaced}</div>`}</td>
      <td>${Object.entries(one.fields).map(([name, value]) => html`<div><code>${name} = ${JSON.stringify(value)}</code></div>`)}</td>
      <td class="number">${one.calls}</td><td class="number">${one.mean_us} µs</td>
      <td class="number">${one.longest_ms.toFixed(2)} ms</td><td class="number">${one.slow}</td>
      <td class=${one.faults ? "number bad" : "number"}>${one.faults}</td>
      <td>${Object.entries(one.overruled).map(([reason, count]) => html`<div>${count} × ${reason}</div>`)}</td>
      <td>${one.choices.length ? html`<button aria-expanded=${String(open === one.table)} aria-label=${`Change ${one.table}`}
        onClick=${() => setOpen(open === one.table ? "" : one.table)}>Change</button>` : null}</td></tr>
      ${open === one.table && html`<tr class="why"><td colspan="10"><${Change} policy=${one} onDone=${finish} /></td></tr>`}`)}
    </tbody></table></div>
    <p class="faint">A change lasts until the server stops, and needs the rights of /admin/.</p>`;
}

const UNITS = [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];

function size(bytes) {
  const [unit, name] = UNITS.find(([one]) => Math.abs(bytes) >= one) || [1, "bytes"];
  return `${(bytes / unit).toFixed(unit > 1 ? 1 : 0)} ${name}`;
}

export function Memory({ state }) {
  const { pools = [], in_use = {}, processes = {}, ranks = {} } = state.memory;
  const own = Object.entries(processes);
  for (const [group, members] of Object.entries(ranks)) {
    for (const [rank, kinds] of Object.entries(members)) {
      const parts = Object.entries(kinds).map(([kind, bytes]) => `${kind} ${size(bytes)}`).join(", ");
      own.push([`${group} rank ${rank}`, kinds.resident, parts]);
    }
  }
  return html`${pools.map((pool) => html`<h2 id=${pool.pool}>${pool.pool}: ${size(pool.total)}</h2>
      <div class="scroll"><table aria-labelledby=${pool.pool}><thead><tr><th scope="col">owner</th><th scope="col">for</th>
        <th scope="col" class="number">size</th><th scope="col" class="number">share</th>
        <th scope="col" class="number">in use now, all owners</th></tr></thead><tbody>
      ${pool.lines.map((line) => html`<tr><th scope="row">${line.owner || "–"}</th>
        <td class=${line.bytes < 0 ? "bad" : ""}>${line.line}</td><td class="number">${size(line.bytes)}</td>
        <td class="number">${pool.total ? `${Math.round((100 * line.bytes) / pool.total)} %` : ""}</td>
        <td class="number">${line.line in in_use ? size(in_use[line.line]) : ""}</td></tr>`)}</tbody></table></div>`)}
    <h2 id="processes">Processes</h2><div class="scroll"><table aria-labelledby="processes"><thead><tr><th scope="col">process</th>
      <th scope="col" class="number">size</th><th scope="col">parts</th></tr></thead><tbody>
      ${own.map(([name, bytes, parts]) => html`<tr><th scope="row">${name.replaceAll("_", " ")}</th>
        <td class="number">${bytes == null ? "" : size(bytes)}</td><td>${parts || ""}</td></tr>`)}</tbody></table></div>`;
}
