// Reads the data element and fills the sections.

const data = JSON.parse(byId("data").textContent);

function line(chartSpec) {
  const { title, names, log } = chartSpec;
  const unit = data.metrics[names[0]][0];
  const series = names.map((name) => ({
    name, label: names.length > 1 ? name.split("/")[0] === "train" ? words(name) : name.split("/")[0] : "",
    values: data.columns[name], intervals: data.intervals[name],
  }));
  const note = names.map((name) => `${name} [${data.metrics[name][0]}]: ${data.metrics[name][1]}`).join("\n");
  return lineChart({ title, note, steps: data.steps, series, log, unit });
}

function stacks() {
  const present = (names) => names.filter((s) => (data.columns[s.name] ?? []).some((v) => isNumber(v) && v > 0))
    .map((s) => ({ ...s, label: words(s.name.split("/").at(-1)), values: data.columns[s.name] }));
  const endings = present(data.endings.map((e) => ({ name: `rollout/ending/${e.name}`, kind: `e-${e.name}` })));
  const errors = present(data.errors.map((name, k) => ({ name: `rollout/count/${name}`, kind: `q${k}` })));
  const times = present(Object.keys(data.columns).filter((name) => name.startsWith("time/")).map((name, k) => ({ name, kind: `q${k % 8}` })));
  const shown = [];
  if (endings.length) shown.push(stackChart({ title: "Endings per step", note: "How the training episodes ended", steps: data.steps, series: endings }));
  if (data.columns["rollout/episodes"]) shown.push(errors.length
    ? stackChart({ title: "Tool and parse errors per step", note: "Sums over the training episodes", steps: data.steps, series: errors })
    : el("figure", { class: "chart" }, el("figcaption", {}, "Tool and parse errors per step"), el("p", { class: "quiet" }, "None in any step.")));
  const wall = times.length ? stackChart({ title: "Wall-clock shares", note: "Seconds of each part of the step", steps: data.steps, series: times, shares: true }) : null;
  return [shown, wall];
}

// What the reward was paid for, with true success as a line over it. Bars cannot show a part below 0: then the parts stay curves among the rest.
function audit() {
  const parts = data.paid.filter((name) => (data.columns[name] ?? []).some((v) => isNumber(v) && v !== 0));
  const success = data.columns["rollout/success"];
  if (!parts.length || !success || parts.some((name) => data.columns[name].some((v) => v < 0))) return [];
  return [stackChart({
    title: "What the reward was paid for", note: parts.map((name) => `${name}: ${data.metrics[name][1]}`).join("\n"), steps: data.steps,
    series: parts.map((name) => ({ name, kind: `p-${name.split("/").at(-1)}`, label: PAID[name.split("/").at(-1)], values: data.columns[name] })),
    over: { kind: "s-success", label: "true success", values: success },
  })];
}

const PAID = { true: "true fixes", wrong: "wrong fixes", tampering: "tampering", ungraded: "not graded" };

function main() {
  byId("name").textContent = data.name;
  byId("headline").append(headline(data.headline));
  const { steps, collected } = data;
  byId("extent").textContent = steps.length
    ? `Steps ${steps[0]} to ${steps.at(-1)} · ${figure(collected.episodes)} episodes stored`
    : `No metrics · ${figure(collected.episodes)} episodes stored`;
  if (data.problems.length) byId("problems").append(el("div", { class: "problems", role: "alert" },
    el("b", {}, "Parts of the run could not be read"), el("ul", {}, ...data.problems.map((text) => el("li", {}, text)))));

  if (data.alarms.length) byId("problems").append(el("div", { class: "problems", id: "alarm", role: "alert" },
    el("b", {}, "The reward rises and true success does not: the policy may be gaming the verifier"),
    el("ul", {}, ...data.alarms.map((text) => el("li", {}, text)))));

  if (steps.length) {
    const [bars, wall] = stacks();
    byId("charts").append(...data.charts.map(line), ...(wall ? [wall] : []));
    byId("stacks").append(...audit(), ...bars);
    byId("totals").append(...totals(data));
    byId("per-step").append(perStep(data));
    const drawn = new Set(data.charts.flatMap((c) => c.names));
    const others = Object.keys(data.columns).filter((name) => !drawn.has(name) && !/^time\/|\/ending\//.test(name));
    byId("more").addEventListener("toggle", () => {
      byId("other-charts").append(...others.map((name) => line({ title: name, names: [name], log: false })));
    }, { once: true });
    if (!others.length) byId("more").remove();
  } else {
    byId("charts").append(el("p", { class: "quiet" }, "No step has been measured yet."));
    byId("more").remove();
  }
  byId("viewer").append(...viewer(data));
  byId("config").append(config(data));
  byId("glossary").append(glossary(data));
}

main();
