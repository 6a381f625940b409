// What the page remembers of the states that it received: the steps, requests and rates of the last minute.

export const WINDOW_S = 60;
const STEPS_MAX = 64; // of a group in one state
const PHASES = ["prepare", "encode", "queue", "prefill", "decode"];

// Phases of an ended request as [phase, start, end] in seconds.
function endedSpans(row) {
  const spans = [];
  let end = row.ended_ns / 1e9;
  for (const [phase, ms] of [["decode", row.decode_ms], ["prefill", row.prefill_ms], ["queue", row.queue_ms],
    ["encode", row.encode_ms], ["prepare", row.preprocess_ms]]) {
    const start = end - ms / 1e3;
    if (ms > 0) spans.unshift([phase, start, end]);
    end = start;
  }
  return spans;
}

// Phases so far of a request that has not ended.
function liveSpans(row, now) {
  const times = [row.submitted_ns, row.items_ready_ns, row.admitted_ns, row.first_token_ns].map((ns) => ns / 1e9);
  if (!times[0]) return row.since_ns ? [["prepare", row.since_ns / 1e9, now]] : [];
  const spans = [];
  for (let i = 0; i < 4; i++) {
    const end = times[i + 1] || now;
    if (end > times[i]) spans.push([PHASES[i + 1], times[i], end]);
    if (!times[i + 1]) break;
  }
  return spans;
}

export class History {
  constructor() {
    this.now = 0;
    this.steps = new Map(); // group -> [{start, end, name, kind, args}]
    this.requests = new Map(); // id -> {id, spans, ended, args}
    this.points = []; // {t, running, waiting, output, prompt}
    this.last = new Map(); // group -> end of its latest step
    this.missedAt = -Infinity; // when steps were too many for one state
  }

  add(state) {
    const now = this.now = state.now_ns / 1e9;
    for (const [group, steps] of Object.entries(state.steps)) {
      this.addSteps(group, steps, (decodes, prefill) => ({
        name: prefill ? `prefill ${prefill}` + (decodes ? ` + decode ${decodes}` : "") : `decode ${decodes}`,
        kind: prefill ? "prefill" : "decode", args: { decodes, prefill_tokens: prefill },
      }));
    }
    this.addSteps("encode", state.encodes, (items, tokens) => ({
      name: `encode ${items}`, kind: "encode", args: { items, tokens },
    }));
    for (const row of state.requests) {
      this.requests.set(row.request_id, {
        id: row.request_id, spans: liveSpans(row, now), ended: false,
        args: { prompt_tokens: row.prompt_tokens, output_tokens: row.outputs, images: row.images },
      });
    }
    for (const row of state.ended) {
      const { prompt_tokens, output_tokens, finish_reason } = row;
      this.requests.set(row.request_id, {
        id: row.request_id, spans: endedSpans(row), ended: true,
        args: { prompt_tokens, output_tokens, finish_reason },
      });
    }
    this.addPoint(state, now);
    this.prune(now - WINDOW_S - 5);
  }

  addSteps(group, steps, describe) {
    if (!steps.length) return;
    const known = this.steps.get(group) || [], last = this.last.get(group) || 0;
    if (last && steps.length >= STEPS_MAX && steps[0][0] - steps[0][1] > last) this.missedAt = this.now;
    for (const [end, took, first, second] of steps) {
      if (end > last) known.push({ start: (end - took) / 1e9, end: end / 1e9, ...describe(first, second) });
    }
    this.steps.set(group, known);
    this.last.set(group, steps[steps.length - 1][0]);
  }

  addPoint(state, now) {
    const { running = 0, waiting = 0, generate = {} } = state.counters;
    const point = { t: now, running, waiting, decoded: generate.tokens_decoded || 0,
      prefilled: generate.tokens_prefilled || 0, output: null, prompt: null };
    const before = this.points.findLast((one) => one.t <= now - 0.9) || this.points[0];
    if (before && now > before.t) {
      point.output = Math.max(0, (point.decoded - before.decoded) / (now - before.t));
      point.prompt = Math.max(0, (point.prefilled - before.prefilled) / (now - before.t));
    }
    this.points.push(point);
  }

  prune(before) {
    for (const [group, steps] of this.steps) this.steps.set(group, steps.filter((one) => one.end >= before));
    for (const [id, one] of this.requests) {
      const end = one.spans.length ? one.spans[one.spans.length - 1][2] : 0;
      if (end < before) this.requests.delete(id);
    }
    this.points = this.points.filter((one) => one.t >= before);
  }

  // A copy that later states do not change, for a paused timeline.
  copy() {
    const other = new History();
    other.now = this.now;
    other.missedAt = this.missedAt;
    other.steps = new Map([...this.steps].map(([group, steps]) => [group, [...steps]]));
    other.requests = new Map(this.requests);
    other.points = [...this.points];
    return other;
  }
}

// The part from `from` to `to` (seconds) in the format of `vsched replay --timeline`, for ui.perfetto.dev.
export function perfettoTrace(history, from, to) {
  const events = [], at = (s) => Math.round((s - from) * 1e6 * 1000) / 1000;
  const inside = (start, end) => end >= from && start <= to;
  const name = (pid, text) => {
    events.push({ ph: "M", name: "process_name", pid, args: { name: text } });
    events.push({ ph: "M", name: "process_sort_index", pid, args: { sort_index: pid } });
  };
  name(1, "scheduler");
  let pid = 1;
  for (const [group, steps] of history.steps) {
    name(++pid, group);
    events.push({ ph: "M", name: "thread_name", pid, tid: 1, args: { name: "steps" } });
    // The start of a step is the arrival of its result minus its time on the ranks, and can be before the end of the
    // previous step. Perfetto drops slices that overlap.
    let free = from;
    for (const one of steps) {
      if (!inside(one.start, one.end)) continue;
      const start = Math.max(one.start, free);
      free = one.end;
      events.push({ ph: "X", name: one.name, pid, tid: 1, ts: at(start), dur: (one.end - start) * 1e6, args: one.args });
    }
  }
  let id = 0;
  for (const request of history.requests.values()) {
    const spans = request.spans.filter(([, start, end]) => inside(start, end));
    if (!spans.length) continue;
    const common = { cat: "request", id: ++id, pid: 1, tid: 1 };
    const span = (text, start, end, args) => {
      events.push({ ph: "b", ts: at(Math.max(start, from)), args, name: text, ...common });
      events.push({ ph: "e", ts: at(Math.min(end, to)), name: text, ...common });
    };
    span(request.ended ? request.id : `${request.id} (goes on)`, spans[0][1], spans[spans.length - 1][2], request.args);
    for (const [phase, start, end] of spans) span(phase, start, end, {});
  }
  for (const point of history.points) {
    if (!inside(point.t, point.t)) continue;
    const args = { waiting: point.waiting, running: point.running };
    events.push({ ph: "C", name: "requests", pid: 1, ts: at(point.t), args });
  }
  return { displayTimeUnit: "ms", traceEvents: events };
}
