// Small line and bar charts over the steps of a run. All share one cursor: pointing at a step in one reads that step in all.

const HEIGHT = 150, LEFT = 46, RIGHT = 10, TOP = 10, BOTTOM = 22;

const cursor = {
  at: null,
  watchers: [],
  move(index) {
    this.at = index;
    for (const watch of this.watchers) watch(index);
  },
};

// About `count` round numbers that cover [low, high].
function ticks(low, high, count = 3) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

function logTicks(low, high) {
  const found = [];
  const from = Math.ceil(Math.log10(low) - 1e-9), to = Math.floor(Math.log10(high) + 1e-9);
  for (let p = from; p <= to; p += Math.max(1, Math.ceil((to - from) / 3))) found.push(10 ** p);
  return found.length > 1 ? found : ticks(low, high);
}

const short = (value) => {
  const size = Math.abs(value);
  if (size >= 1e6) return `${value / 1e6}M`;
  if (size >= 1e4) return `${value / 1e3}k`;
  return size !== 0 && size < 1e-3 ? value.toExponential(0) : String(Number(value.toPrecision(4)));
};

// A line through the numbers among the values, broken where there is something else; a value that was not measured is passed over.
function path(values, x, y) {
  let found = "", open = false;
  values.forEach((value, i) => {
    if (value === null) return;
    if (isNumber(value)) found += `${open ? "L" : "M"}${x(i).toFixed(1)} ${y(value).toFixed(1)}`;
    open = isNumber(value);
  });
  return found;
}

// The frame of every chart: caption, read-out, axes, cursor, pointer and arrow keys.
//   range: [low, high] of the vertical axis, low > 0 if log
//   draw(x, y, width): marks, given the place of a step by its index and of a value
//   read(index): [[class, label, text], ...] for the read-out
function chart({ title, note, steps, range, log = false, bars = false, draw, read, summary }) {
  const readout = el("div", { class: "readout" });
  const canvas = svg("svg", { tabindex: "0", role: "img", "aria-label": `${title}. ${summary} Arrow keys read step by step.`, height: HEIGHT });
  const node = el("figure", { class: "chart" }, el("figcaption", { title: note }, title), readout, canvas);
  const line = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM });
  let x = () => 0;

  const render = (width) => {
    const inner = width - LEFT - RIGHT, span = Math.max(1, steps.at(-1) - steps[0]);
    const slot = inner / (span + 1), pad = bars ? slot / 2 : 4;
    x = (index) => (steps.length === 1 ? LEFT + inner / 2 : LEFT + pad + ((steps[index] - steps[0]) / span) * (inner - 2 * pad));
    const [low, high] = range.map(log ? Math.log10 : Number);
    const y = (value) => TOP + (1 - ((log ? Math.log10(value) : value) - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
    const rows = (log ? logTicks : ticks)(...range).map((value) => svg("g", { class: "tick" },
      svg("line", { x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
      svg("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, short(value))));
    const marks = steps.length === 1 ? [steps[0]] : ticks(steps[0], steps.at(-1), Math.min(5, span)).filter(Number.isInteger);
    const columns = marks.map((step) => {
      const at = steps.length === 1 ? LEFT + inner / 2 : LEFT + pad + ((step - steps[0]) / span) * (inner - 2 * pad);
      return svg("text", { class: "tick", x: at, y: HEIGHT - 6, "text-anchor": "middle" }, String(step));
    });
    canvas.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    canvas.replaceChildren(...rows, ...columns, ...draw(x, y, Math.max(1, Math.min(22, slot * 0.82))), line);
    point(cursor.at);
  };
  const point = (at) => {
    const index = at ?? steps.length - 1;
    line.setAttribute("x1", x(index));
    line.setAttribute("x2", x(index));
    line.classList.toggle("on", at !== null);
    readout.replaceChildren(el("span", { class: "at" }, `step ${steps[index]}`), ...read(index).map(([kind, label, text]) =>
      el("span", { class: "value" }, el("i", { class: `key ${kind}` }), `${label} `, el("b", {}, text))));
  };
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect(), at = event.clientX - box.left;
    let best = 0;
    steps.forEach((_, i) => { if (Math.abs(x(i) - at) < Math.abs(x(best) - at)) best = i; });
    cursor.move(best);
  });
  canvas.addEventListener("pointerleave", () => cursor.move(null));
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    cursor.move(Math.max(0, Math.min(steps.length - 1, (cursor.at ?? steps.length - 1) + move)));
  });
  canvas.addEventListener("focus", () => readout.setAttribute("aria-live", "polite"));
  canvas.addEventListener("blur", () => readout.removeAttribute("aria-live"));
  cursor.watchers.push(point);
  new ResizeObserver(([entry]) => { if (entry.contentRect.width > LEFT + RIGHT) render(entry.contentRect.width); }).observe(canvas);
  return node;
}

// series: [{name, label, values, intervals?}], values null where a step did not measure it and text where it is not finite.
function lineChart({ title, note, steps, series, log = false, unit }) {
  const all = series.flatMap((s) => [...s.values, ...(s.intervals ?? []).flat()]).filter(isNumber);
  log = log && all.length > 0 && all.every((v) => v > 0);
  const top = Math.max(...all), bottom = Math.min(...all);
  let range = [bottom, top];
  if (!all.length) range = [0, 1];
  else if (unit === "fraction" && top > 0.5) range = [0, 1];
  else if (log) range = [bottom / 1.3, top * 1.3];
  else if (top === 0 && bottom === 0) range = [0, 1];
  else if (bottom >= 0 && bottom < 0.5 * top) range = [0, top * 1.06];
  else { const pad = (top - bottom) * 0.08 || Math.abs(top) * 0.1 || 1; range = [bottom - pad, top + pad]; }

  const draw = (x, y) => series.flatMap((s, k) => {
    const kind = `s${k}`, nodes = [];
    let count = 0;
    s.values.forEach((value, i) => {
      if (value === null) return;
      if (!isNumber(value)) {
        nodes.push(svg("text", { class: "bad", x: x(i), y: TOP + 8, "text-anchor": "middle" }, "×"));
        return;
      }
      count += 1;
      const bounds = s.intervals?.[i];
      if (bounds) nodes.push(svg("line", { class: `whisker ${kind}`, x1: x(i), x2: x(i), y1: y(bounds[0]), y2: y(bounds[1]) }));
    });
    nodes.push(svg("path", { class: `line ${kind}`, d: path(s.values, x, y) }));
    if (count <= 12) s.values.forEach((value, i) => {
      if (isNumber(value)) nodes.push(svg("circle", { class: `dot ${kind}`, cx: x(i), cy: y(value), r: 3 }));
    });
    return nodes;
  });
  const read = (index) => series.map((s, k) => [`s${k}`, s.label, figure(s.values[index])]);
  const summary = series.map((s) => {
    const known = s.values.map((v, i) => [v, steps[i]]).filter(([v]) => v !== null);
    return `${s.label}: ${figure(known[0][0])} at step ${known[0][1]}, ${figure(known.at(-1)[0])} at step ${known.at(-1)[1]}.`;
  }).join(" ");
  return chart({ title, note, steps, range, log, draw, read, summary });
}

// series: [{name, label, kind, values}]: bars on top of each other, as counts or as shares of their sum. over: {label, kind, values}, a line.
function stackChart({ title, note, steps, series, shares = false, over = null }) {
  const totals = steps.map((_, i) => sum(series.map((s) => (isNumber(s.values[i]) ? s.values[i] : 0))));
  const height = (s, i) => (!isNumber(s.values[i]) || !totals[i] ? 0 : shares ? s.values[i] / totals[i] : s.values[i]);
  const range = [0, shares ? 1 : Math.max(1, ...totals) * 1.04];
  const draw = (x, y, width) => [...bars(x, y, width), ...(over ? [svg("path", { class: `line ${over.kind}`, d: path(over.values, x, y) })] : [])];
  const bars = (x, y, width) => steps.flatMap((_, i) => {
    let base = 0;
    return series.map((s) => {
      const from = base;
      base += height(s, i);
      return svg("rect", { class: `bar ${s.kind}`, x: x(i) - width / 2, width, y: y(base), height: Math.max(0, y(from) - y(base)) });
    });
  });
  const text = (s, i) => (shares ? `${figure(s.values[i])} s (${percent(height(s, i))})` : figure(s.values[i]));
  const read = (i) => [...series.filter((s) => height(s, i) > 0), ...(over ? [over] : [])].map((s) => [s.kind, s.label, text(s, i)]);
  const total = (s) => (over ? `${figure(s.values.at(-1))} at step ${steps.at(-1)}` : `${figure(sum(s.values.filter(isNumber)))} in all`);
  const summary = [...series, ...(over ? [over] : [])].map((s) => `${s.label}: ${total(s)}.`).join(" ");
  return chart({ title, note, steps, range, bars: true, draw, read, summary });
}
