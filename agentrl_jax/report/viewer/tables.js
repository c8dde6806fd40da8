// Headline, totals, configuration and glossary.

// Success before and after as numbers and as dots with their 95 % intervals on one axis from 0 to 1.
function headline(data) {
  if (!data) return el("p", { class: "quiet" }, "Success was not measured.");
  const { phase, ends } = data, names = ends.length > 1 ? ["before", "after"] : ["measured once"];
  const whose = phase === "eval" ? "Success on the evaluation tasks" : "Success on the training tasks";
  const place = (value) => 4 + 232 * value;
  const rows = ends.map((end, i) => svg("g", { class: names[i].split(" ")[0] },
    svg("line", { class: "interval", x1: place(end.low), x2: place(end.high), y1: 12 + 20 * i, y2: 12 + 20 * i }),
    svg("circle", { cx: place(end.success), cy: 12 + 20 * i, r: 5 })));
  const bottom = 20 * ends.length + 2;
  const axis = [0, 0.25, 0.5, 0.75, 1].flatMap((value) => [
    svg("line", { class: "grid-line", x1: place(value), x2: place(value), y1: 2, y2: bottom }),
    svg("text", { class: "tick", x: place(value), y: bottom + 12, "text-anchor": value === 0 ? "start" : "middle" }, value % 0.5 ? "" : `${100 * value} %`)]);
  const spoken = ends.map((end, i) => `${names[i]}: ${percent(end.success)}, interval ${percent(end.low)} to ${percent(end.high)}`).join("; ");
  return el("div", { class: "headline" },
    el("p", { class: "quiet" }, whose),
    el("div", { class: "ends" }, ...ends.map((end, i) => el("div", { class: names[i].split(" ")[0] },
      el("span", { class: "label" }, `${names[i]} · step ${end.step}`),
      el("b", {}, percent(end.success)),
      el("span", { class: "quiet" }, `${percent(end.low)} – ${percent(end.high)}`, el("br"), `95 % interval, n = ${end.n}`)))),
    svg("svg", { viewBox: `0 0 260 ${bottom + 16}`, role: "img", "aria-label": spoken }, ...axis, ...rows));
}

// Totals over the run, one table for endings and one for errors; the endings add up to the episodes.
function totals(data) {
  const column = (name) => (data.columns[name] ?? []).filter(isNumber);
  const episodes = sum(column("rollout/episodes")), turns = sum(data.steps.map((_, i) => {
    const [n, mean] = ["rollout/episodes", "rollout/turns"].map((name) => data.columns[name]?.[i]);
    return isNumber(n) && isNumber(mean) ? n * mean : 0;
  }));
  const endings = data.endings.map(({ name, kind }) => {
    const total = sum(column(`rollout/ending/${name}`));
    return [el("span", {}, el("i", { class: `key e-${name}` }), words(name)), kind, figure(total), episodes ? percent(total / episodes) : "–"];
  });
  const errors = data.errors.map((name, k) => {
    const total = sum(column(`rollout/count/${name}`));
    return [el("span", {}, el("i", { class: `key q${k}` }), words(name)), figure(total), turns ? figure((100 * total) / turns) : "–"];
  });
  return [
    el("div", {}, table(["ending", "kind", "episodes", "share"],
      [...endings, [el("b", {}, "all endings"), "", figure(sum(endings.map((_, i) => sum(column(`rollout/ending/${data.endings[i].name}`))))), ""],
        [el("b", {}, "all episodes"), "", figure(episodes), ""]], { id: "ending-totals" })),
    el("div", {}, table(["observation to the policy", "events", "per 100 turns"], errors, { id: "error-totals" }),
      el("p", { class: "quiet" }, "Errors end no episode: the policy sees them and goes on.")),
  ];
}

function perStep(data) {
  const names = [...data.endings.map((e) => `rollout/ending/${e.name}`), ...data.errors.map((e) => `rollout/count/${e}`)];
  const head = ["step", "episodes", ...names.map((name) => words(name.split("/").at(-1)))];
  const cell = (name, i) => figure(data.columns[name]?.[i] ?? null);
  return table(head, data.steps.map((step, i) => [String(step), cell("rollout/episodes", i), ...names.map((name) => cell(name, i))]));
}

// Nested values as one list of dotted keys.
function flatten(value, key = "") {
  if (value === null || typeof value !== "object") return [[key, quote(value)]];
  const entries = Object.entries(value);
  if (!entries.length || (Array.isArray(value) && entries.every(([, v]) => v === null || typeof v !== "object"))) return [[key, quote(value)]];
  return entries.flatMap(([name, inner]) => flatten(inner, key ? `${key}.${name}` : name));
}

const config = (data) => (data.config === null
  ? el("p", { class: "quiet" }, "The run holds no configuration.")
  : table(["key", "value"], flatten(data.config).map(([key, value]) => [key, el("code", {}, value)])));

const glossary = (data) => table(["metric", "unit", "meaning"], Object.entries(data.metrics).map(([name, [unit, meaning]]) => [el("code", {}, name), unit, meaning]));
