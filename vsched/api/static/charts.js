// Line charts of the last minute, and maps of memory.

import { html, useEffect, useRef } from "./vendor/htm-preact.js";
import { WINDOW_S } from "./history.js";

const { uPlot } = window;

export function colour(name) {
  const probe = colour.probe || (colour.probe = document.body.appendChild(document.createElement("i")));
  probe.hidden = true;
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

// A chart of `series` ([{key, label, colour}]) of the points of a history.
export function Chart({ title, points, series }) {
  const place = useRef(), plot = useRef();
  const end = points.length ? points[points.length - 1].t : 0;
  const data = [points.map((one) => one.t - end), ...series.map(({ key }) => points.map((one) => one[key]))];
  useEffect(() => {
    const axis = { stroke: colour("faint"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line"), width: 1 } };
    const width = () => place.current.clientWidth || 400;
    const made = plot.current = new uPlot({
      width: width(), height: 150, cursor: { drag: { x: false, y: false } }, legend: { live: false },
      scales: { x: { time: false, range: [-WINDOW_S, 0] }, y: { range: (_, low, high) => [0, Math.max(high || 0, 1) * 1.05] } },
      axes: [{ ...axis, values: (_, ticks) => ticks.map((s) => `${s} s`) }, axis],
      series: [{ label: "time", value: (_, s) => (s == null ? "" : `${s.toFixed(1)} s`) },
        ...series.map((one) => ({ label: one.label, stroke: colour(one.colour), width: 2, spanGaps: true,
          value: (_, value) => (value == null ? "" : value.toFixed(1)) }))],
    }, data, place.current);
    const resized = new ResizeObserver(() => made.setSize({ width: width(), height: 150 }));
    resized.observe(place.current);
    return () => { resized.disconnect(); made.destroy(); };
  }, []);
  useEffect(() => { if (plot.current) plot.current.setData(data); });
  const latest = points[points.length - 1] || {};
  const text = series.map(({ key, label }) => `${label} ${Math.round(latest[key] || 0)}`).join(", ");
  return html`<figure role="img" aria-label=${`${title}: ${text}`}>
    <figcaption class="faint">${title}</figcaption><div ref=${place}></div></figure>`;
}

const COLOURS = { held: "decode", cached: "prefill", read: "decode", claimed: "queue", encoding: "encode", decode: "decode",
  prefill: "prefill", free: "free" };
const CELL = 10;

// A map of blocks or pages; the colour of a cell is that of its most frequent state.
export function MemoryMap({ title, map }) {
  const canvas = useRef();
  const { totals } = map;
  const free = map.count - totals.reduce((sum, one) => sum + one, 0);
  const text = [...map.states.map((state, index) => `${totals[index]} ${state}`), `${free} free`].join(", ");
  useEffect(() => {
    const node = canvas.current, columns = Math.max(10, Math.floor((node.parentNode.clientWidth || 400) / CELL));
    const rows = Math.max(1, Math.ceil(map.cells.length / columns)), ratio = window.devicePixelRatio || 1;
    node.width = columns * CELL * ratio;
    node.height = rows * CELL * ratio;
    node.style.height = `${rows * CELL}px`;
    node.style.width = `${columns * CELL}px`;
    const draw = node.getContext("2d");
    draw.scale(ratio, ratio);
    const names = [...map.states, "free"], colours = names.map((state) => colour(COLOURS[state]));
    map.cells.forEach((cell, index) => {
      const shares = [...cell, 100 - cell.reduce((sum, one) => sum + one, 0)];
      draw.fillStyle = colours[shares.indexOf(Math.max(...shares))];
      draw.fillRect((index % columns) * CELL, Math.floor(index / columns) * CELL, CELL - 1, CELL - 1);
    });
  });
  return html`<section><h2>${title}</h2>
    <canvas ref=${canvas} role="img" aria-label=${`${title}: ${text}`}></canvas>
    <p class="legend">${[...map.states, "free"].map((state, index) => html`<span
      class=${`swatch-${COLOURS[state]}`}>${state} ${totals[index] ?? free}</span>`)}
      ${map.per_cell > 1 ? ` a cell is ${map.per_cell} of them` : ""}</p></section>`;
}
