// The last minute: the steps of each group, and the phases of requests.

import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { colour } from "./charts.js";
import { perfettoTrace, WINDOW_S } from "./history.js";

const ROW = 16, GAP = 3, LABEL = 110, LANES_MAX = 40, AXIS = 18;
const KINDS = ["prepare", "encode", "queue", "prefill", "decode"];

// Put requests into lanes without overlaps, as far as there are lanes.
function lanesOf(history, from, to) {
  const lanes = [];
  const shown = [...history.requests.values()].filter(({ spans }) => spans.length &&
    spans[spans.length - 1][2] >= from && spans[0][1] <= to).sort((a, b) => a.spans[0][1] - b.spans[0][1]);
  let left = 0;
  for (const request of shown) {
    const start = request.spans[0][1], end = request.spans[request.spans.length - 1][2];
    let lane = lanes.find((one) => one.end <= start);
    if (!lane && lanes.length < LANES_MAX) lanes.push(lane = { end: 0, requests: [] });
    if (!lane) { left++; continue; }
    lane.end = end;
    lane.requests.push(request);
  }
  return { lanes, left };
}

// Draw, and return the boxes for the pointer.
function paint(node, history, from, to) {
  const { lanes, left } = lanesOf(history, from, to), groups = [...history.steps];
  const ratio = window.devicePixelRatio || 1, width = node.parentNode.clientWidth || 800;
  const height = AXIS + (groups.length + lanes.length) * (ROW + GAP) + 8;
  node.width = width * ratio;
  node.height = height * ratio;
  node.style.height = `${height}px`;
  const draw = node.getContext("2d"), scale = (width - LABEL) / (to - from), boxes = [];
  const x = (s) => LABEL + (s - from) * scale;
  const colours = Object.fromEntries(KINDS.map((kind) => [kind, colour(kind)]));
  draw.scale(ratio, ratio);
  draw.font = "12px system-ui, sans-serif";
  draw.textBaseline = "middle";
  draw.fillStyle = colour("faint");
  draw.strokeStyle = colour("line");
  const tick = [0.1, 0.25, 0.5, 1, 2, 5, 10, 15].find((one) => one * scale >= 70) || 30;
  for (let s = Math.ceil(from / tick) * tick; s <= to; s += tick) {
    const text = `${(s - history.now).toFixed(tick < 1 ? 2 : 0)} s`;
    if (x(s) + 2 + draw.measureText(text).width <= width) draw.fillText(text, x(s) + 2, AXIS / 2);
    draw.beginPath();
    draw.moveTo(x(s), AXIS);
    draw.lineTo(x(s), height);
    draw.stroke();
  }
  const box = (y, start, end, kind, text) => {
    const begin = Math.max(x(start), LABEL), past = Math.min(x(end), width);
    if (past <= LABEL || begin >= width) return;
    draw.fillStyle = colours[kind];
    draw.fillRect(begin, y, Math.max(past - begin, 1), ROW);
    boxes.push({ left: begin, right: Math.max(past, begin + 1), y, text });
  };
  let y = AXIS;
  for (const [group, steps] of groups) {
    draw.fillStyle = colour("text");
    draw.fillText(group, 4, y + ROW / 2, LABEL - 8);
    for (const one of steps) box(y, one.start, one.end, one.kind, `${group}: ${one.name}, ${((one.end - one.start) * 1e3).toFixed(1)} ms`);
    y += ROW + GAP;
  }
  lanes.forEach((lane, index) => {
    draw.fillStyle = colour("faint");
    if (!index) draw.fillText("requests", 4, y + ROW / 2, LABEL - 8);
    for (const request of lane.requests) {
      for (const [phase, start, end] of request.spans) {
        box(y, start, end, phase, `${request.id}: ${phase} ${((end - start) * 1e3).toFixed(1)} ms`);
      }
    }
    y += ROW + GAP;
  });
  return { boxes, left };
}

function save(history, from, to) {
  const blob = new Blob([JSON.stringify(perfettoTrace(history, from, to))], { type: "application/json" });
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = "vsched-timeline.json";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

export function Timeline({ state, history }) {
  const canvas = useRef(), boxes = useRef([]), pulled = useRef(null);
  const [frozen, setFrozen] = useState(null), [span, setSpan] = useState(20), [back, setBack] = useState(0);
  const [hover, setHover] = useState(""), [left, setLeft] = useState(0);
  const shown = frozen || history, to = shown.now - back, from = to - span;
  useEffect(() => {
    const painted = paint(canvas.current, shown, from, to);
    boxes.current = painted.boxes;
    setLeft(painted.left);
  });
  const pause = () => { setFrozen(frozen ? null : history.copy()); setBack(0); };
  const zoom = (factor) => setSpan((now) => Math.min(WINDOW_S, Math.max(0.5, now * factor)));
  const pan = (s) => setBack((now) => Math.min(Math.max(now + s, 0), Math.max(WINDOW_S - span, 0)));
  const onKeys = (event) => {
    const act = { " ": pause, "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1.4),
      ArrowLeft: () => pan(span / 8), ArrowRight: () => pan(-span / 8) }[event.key];
    if (act) { event.preventDefault(); act(); }
  };
  const onMove = (event) => {
    if (pulled.current != null) {
      pan(((event.clientX - pulled.current) * span) / (canvas.current.clientWidth - LABEL));
      pulled.current = event.clientX;
    }
    const { left: x0, top } = canvas.current.getBoundingClientRect(), x = event.clientX - x0, y = event.clientY - top;
    const found = boxes.current.find((one) => x >= one.left && x <= one.right && y >= one.y && y <= one.y + ROW);
    setHover(found ? found.text : "");
  };
  const onWheel = (event) => { event.preventDefault(); zoom(event.deltaY > 0 ? 1.2 : 0.8); };
  useEffect(() => {
    const node = canvas.current;
    node.addEventListener("wheel", onWheel, { passive: false });
    return () => node.removeEventListener("wheel", onWheel);
  }, []);
  const steps = [...shown.steps.values()].reduce((sum, one) => sum + one.filter((step) => step.end >= from && step.start <= to).length, 0);
  const count = [...shown.requests.values()].filter(({ spans }) => spans.length && spans[0][1] <= to && spans[spans.length - 1][2] >= from).length;
  return html`<div class="controls">
      <button aria-pressed=${String(Boolean(frozen))} onClick=${pause}>${frozen ? "Go on" : "Pause"}</button>
      <label>Seconds shown <input type="range" min="0.5" max=${WINDOW_S} step="0.5" value=${span}
        onInput=${(event) => setSpan(Number(event.target.value))} /> ${span.toFixed(1)}</label>
      <button onClick=${() => pan(span / 4)}>Earlier</button>
      <button disabled=${!back} onClick=${() => pan(-span / 4)}>Later</button>
      <button onClick=${() => save(shown, from, to)}>Save for Perfetto</button></div>
    <p class="legend">${KINDS.map((kind) => html`<span class=${`swatch-${kind}`}>${kind}</span>`)}</p>
    <canvas ref=${canvas} class="timeline" tabindex="0" role="img" onKeyDown=${onKeys}
      onPointerDown=${(event) => { pulled.current = event.clientX; canvas.current.setPointerCapture(event.pointerId); }}
      onPointerUp=${() => { pulled.current = null; }} onPointerMove=${onMove} onPointerLeave=${() => setHover("")}
      aria-label=${`Timeline of ${span.toFixed(1)} seconds: ${steps} steps, ${count} requests. Keys: space pauses, plus and minus zoom, arrows move.`}></canvas>
    ${steps || count ? "" : html`<p>No steps and no requests in this span.</p>`}
    <p class="faint" aria-live="polite">${hover || "Keys: space pauses, + and - zoom, arrows move."}
      ${shown.missedAt >= from ? " Steps are shorter than 8 ms: only a part of them is shown." : ""}
      ${left ? ` ${left} further requests overlap with those shown.` : ""}</p>`;
}
