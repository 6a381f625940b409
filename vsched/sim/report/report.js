// Charts of the report: hover, zoom, keyboard.
"use strict";

(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)");
  const nines = (percent) => -Math.log10(1 - percent / 100);
  const MARKS = [0, 50, 90, 99, 99.9, 99.99].map((percent) => [nines(percent), `${percent} %`]);
  const HEIGHT = 220, KEYS = ["ArrowLeft", "ArrowRight", "Home", "End", "+", "-", "0", "Escape"];
  const plots = []; // {chart, figure, plot}
  let tenant = "";

  const probe = document.body.appendChild(document.createElement("i"));
  probe.hidden = true;
  function colour(name) {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  }
  const number = (value) => (value == null ? "" : Number(value.toPrecision(4)).toLocaleString("en-US"));

  function valuesOf(chart) {
    if (chart.x === "time") return [data.times, ...chart.values];
    const own = tenant && data.tenants[tenant][chart.key];
    return [data.percentiles.map(nines), ...(own || chart.values)];
  }

  function zoom(chart, range) {
    for (const one of plots) {
      if (one === chart || (chart.chart.x === "time" && one.chart.x === "time")) one.plot.setScale("x", range);
    }
  }

  function extent(one) {
    const xs = one.plot.data[0];
    return { min: xs[0] || 0, max: xs[xs.length - 1] || 1 };
  }

  function make(one) {
    const { chart, figure } = one, place = figure.querySelector(".plot"), byTime = chart.x === "time";
    const width = () => place.clientWidth || 400;
    const line = { stroke: colour("line"), width: 1 }, axis = { stroke: colour("faint"), grid: line, ticks: line };
    const marks = (min, max) => MARKS.map(([x]) => x).filter((x) => x >= min && x <= max);
    const values = valuesOf(chart), logarithmic = !byTime && values.slice(1).flat().some((value) => value > 0);
    const label = (x) => (byTime ? `${number(x)} s` : `${number(100 * (1 - 10 ** -x))} %`);
    one.plot = new uPlot({
      width: width(), height: HEIGHT,
      cursor: { drag: { x: true, y: false, setScale: false }, sync: byTime ? { key: "time" } : undefined,
        bind: { dblclick: () => () => zoom(one, extent(one)) } },
      scales: {
        x: { time: false },
        y: logarithmic ? { distr: 3 } : { range: (_, low, high) => [0, (high || 1) * 1.05] },
      },
      axes: [
        byTime ? { ...axis, values: (_, ticks) => ticks.map((s) => `${number(s)} s`) } : {
          ...axis,
          splits: (_, index, min, max) => {
            const found = marks(min, max);
            return found.length > 1 ? found : [min, (min + max) / 2, max];
          },
          values: (_, ticks) => ticks.map(label),
        },
        { ...axis, size: 62, values: (_, ticks) => ticks.map((value) => (value == null ? "" : number(value))) },
      ],
      series: [
        { label: byTime ? "time" : "percentile", value: (_, x) => (x == null ? "" : label(x)) },
        ...data.labels.map((name, index) => ({
          label: name, stroke: colour(`series-${index % 8}`), width: 2, points: { show: false },
          dash: index >= 8 ? [6, 4] : undefined, value: (_, value) => number(value),
        })),
      ],
      hooks: {
        setSelect: [(plot) => {
          if (plot.select.width < 3) return;
          const min = plot.posToVal(plot.select.left, "x"), max = plot.posToVal(plot.select.left + plot.select.width, "x");
          plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          zoom(one, { min, max });
        }],
        setScale: [(plot, key) => {
          if (key === "x") place.dataset.range = `${plot.scales.x.min} ${plot.scales.x.max}`;
        }],
      },
    }, values, place);
    one.text = label;
  }

  // Show the values at a place, and let a screen reader read them.
  function show(one, index) {
    const { plot, figure, chart } = one, x = plot.data[0][index];
    plot.setCursor({ left: plot.valToPos(x, "x"), top: 10 });
    const values = data.labels.map((name, at) => `${name} ${number(plot.data[at + 1][index]) || "none"}`);
    figure.querySelector("output").textContent = `${one.text(x)}: ${values.join(", ")} ${chart.unit}`;
  }

  function onKey(one, event) {
    if (!KEYS.includes(event.key) || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    const { plot } = one, xs = plot.data[0], { min, max } = plot.scales.x;
    if (event.key === "0" || event.key === "Escape") return zoom(one, extent(one));
    const at = plot.cursor.idx ?? xs.findIndex((x) => x >= min);
    if (event.key === "+" || event.key === "-") {
      const middle = xs[at] ?? (min + max) / 2, whole = extent(one);
      const half = (max - min) / (event.key === "+" ? 4 : 1);
      return zoom(one, { min: Math.max(whole.min, middle - half), max: Math.min(whole.max, middle + half) });
    }
    const first = xs.findIndex((x) => x >= min), last = xs.findLastIndex((x) => x <= max);
    const step = Math.max(1, Math.round((last - first) / 100)) * (event.shiftKey ? 10 : 1);
    const wanted = { ArrowLeft: at - step, ArrowRight: at + step, Home: first, End: last }[event.key];
    if (last >= first) show(one, Math.min(last, Math.max(first, wanted)));
  }

  for (const chart of data.charts) {
    const figure = document.querySelector(`[data-chart="${chart.key}"]`), one = { chart, figure, plot: null };
    plots.push(one);
    make(one);
    const place = figure.querySelector(".plot");
    place.addEventListener("keydown", (event) => onKey(one, event));
    new ResizeObserver(() => one.plot.setSize({ width: place.clientWidth || 400, height: HEIGHT })).observe(place);
  }

  function again(some) {
    for (const one of some) {
      one.plot.destroy();
      make(one);
    }
  }

  document.getElementById("tenant")?.addEventListener("change", (event) => {
    tenant = event.target.value;
    const byPercentile = plots.filter(({ chart }) => chart.x === "percentile");
    for (const { chart, figure } of byPercentile) figure.hidden = Boolean(tenant) && !data.tenants[tenant][chart.key];
    again(byPercentile);
  });
  dark.addEventListener("change", () => again(plots));

  root.dataset.ready = "";
})();
