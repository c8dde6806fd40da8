// Episodes token by token: who wrote each token (text colour and underline) and what credit it got (background, policy tokens only).

const LEVELS = 5;

const decode = (base64, type) => new type(Uint8Array.from(atob(base64), (c) => c.charCodeAt(0)).buffer);

// The sample as arrays, and where each episode's tokens start in them.
function unpack(sample) {
  let token = 0, policy = 0;
  const policyAuthor = sample.authors.indexOf("POLICY");
  const starts = sample.episodes.map((episode) => {
    const start = { token, policy };
    for (const [, author, , n] of episode.spans) {
      token += n;
      if (author === policyAuthor) policy += n;
    }
    return start;
  });
  return {
    ...sample, starts, policyAuthor,
    ids: decode(sample.ids, sample.wide ? Uint32Array : Uint16Array),
    logprobs: decode(sample.logprobs, Float32Array),
    advantages: decode(sample.advantages, Float32Array),
  };
}

// All that is known of each token of one episode, in order.
function tokensOf(all, index) {
  let { token, policy } = all.starts[index];
  const tokens = all.episodes[index].spans.flatMap(([segment, author, turn, n, temperature, finish, kv, runs]) => {
    const versions = (runs ?? []).flatMap((version, i) => (i % 2 ? [] : Array(runs[i + 1]).fill(version)));
    return Array.from({ length: n }, (_, i) => {
      const [id, text, hex] = all.vocabulary[all.ids[token++]];
      const known = { segment, author, turn, id, text, hex, last: i === n - 1 };
      if (author !== all.policyAuthor) return known;
      const [logprob, advantage] = [all.logprobs[policy], all.advantages[policy]];
      policy += 1;
      return { ...known, logprob, advantage, version: versions[i], temperature, finish, kv };
    });
  });
  markWholes(tokens);
  return tokens;
}

// Partial characters that follow each other are told what they spell together.
function markWholes(tokens) {
  for (let from = 0, to; from < tokens.length; from = to) {
    for (to = from + 1; tokens[from].hex && tokens[to]?.hex; ) to += 1;
    const run = tokens.slice(from, to).filter((token) => token.hex);
    const bytes = run.flatMap((token) => token.hex.match(/../g).map((byte) => parseInt(byte, 16)));
    for (const token of run) token.whole = new TextDecoder().decode(Uint8Array.from(bytes));
  }
}

// Background of a policy token: 5 levels each side of 0 for advantages, thresholds of probability for log-probs.
const SHADES = {
  advantage: (token, scale) => {
    if (Number.isNaN(token.advantage)) return "";
    if (token.advantage === 0) return "zero";
    return (token.advantage > 0 ? "plus" : "minus") + Math.max(1, Math.ceil((Math.abs(token.advantage) / scale) * LEVELS - 1e-6));
  },
  "log-prob": (token) => `low${[0.9, 0.5, 0.1, 0.01].filter((p) => Math.exp(token.logprob) < p).length}`,
};

const hexOf = (hex) => hex.match(/../g).map((byte) => `\\x${byte.toUpperCase()}`).join("");

function spell(token) {
  if (token.text === null) return [el("i", { class: "raw" }, hexOf(token.hex))];
  const nodes = [];
  for (const part of token.text.split(/(\n|\t)/)) {
    if (part === "\n") nodes.push(el("i", { class: "newline" }), "\n");
    else if (part === "\t") nodes.push(el("i", { class: "tab" }), "\t");
    else for (const run of part.split(EACH_HIDDEN)) {
      if (HIDDEN.test(run)) nodes.push(el("i", { class: "raw" }, `U+${run.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`));
      else if (run) nodes.push(run);
    }
  }
  return nodes;
}

function tip(token, authors) {
  const rows = [
    ["token id", token.id],
    [token.text === null ? "bytes" : "text", token.text === null ? `${hexOf(token.hex)}, part of ${quote(token.whole)}` : quote(token.text)],
    ["author", authors[token.author]],
    ["turn", token.turn],
    ["segment", token.segment],
  ];
  if (token.logprob !== undefined) rows.push(
    ["log-prob", `${token.logprob.toFixed(4)} (p = ${Math.exp(token.logprob).toPrecision(3)})`],
    ["version", token.version],
    ["advantage", Number.isNaN(token.advantage) ? "not known" : figure(token.advantage)],
    ["temperature", token.temperature],
    ...(token.last ? [["span ends by", token.finish + (token.kv === "stale" ? ", stale KV cache" : "")]] : []),
  );
  return rows.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, String(value))]);
}

function facts(episode) {
  const pairs = [
    ["reward", figure(episode.reward)],
    ["success", episode.success === null ? "not known" : episode.success ? "yes" : "no"],
    ["ending", words(episode.ending)],
    ["turns", episode.turns.length],
    ["task", episode.task], ["group", episode.group], ["step", episode.step], ["seed", String(episode.seed)],
    ...Object.entries(episode.components).map(([name, value]) => [`reward: ${words(name)}`, figure(value)]),
    ...(episode.tampering.length ? [["tampering", episode.tampering.join(", ")]] : []),
    ...Object.entries(episode.counters).map(([name, value]) => [words(name), figure(value)]),
    ...Object.entries(episode.timings).map(([name, value]) => [`${words(name)} time`, `${figure(value)} s`]),
  ];
  return el("dl", { class: "facts" }, ...pairs.map(([name, value]) =>
    el("div", {}, el("dt", {}, name), el("dd", {}, isNumber(value) ? figure(value) : String(value)))));
}

// The transcript: one block per turn of each segment, one inline element per span, one per token.
function transcript(all, index, shade, scale) {
  const episode = all.episodes[index], tokens = tokensOf(all, index), blocks = [];
  let at = 0, segment = 0, turn = -1, body = null;
  for (const [seg, author, t, n] of episode.spans) {
    if (seg !== segment) blocks.push(el("p", { class: "segment" }, `Segment ${seg}: the history was rewritten here`));
    if (seg !== segment || t !== turn) {
      const [reward, valid] = episode.turns[t] ?? [null, true];
      const notes = [reward === null ? null : `reward ${figure(reward)}`, valid ? null : "no valid action"].filter(Boolean);
      body = el("div", { class: "text" });
      blocks.push(el("section", { class: "turn" }, el("h4", {}, `Turn ${t}`, el("span", { class: "quiet" }, notes.join(" · "))), body));
    }
    [segment, turn] = [seg, t];
    const name = all.authors[author].toLowerCase();
    const span = el("span", { class: `span ${name}`, "data-author": name, role: "group", "aria-label": name });
    for (let i = 0; i < n; i++, at++) {
      const level = author === all.policyAuthor ? SHADES[shade](tokens[at], scale) : "";
      span.append(el("span", { class: `t ${level}`, "data-i": at, tabindex: at ? "-1" : "0" }, ...spell(tokens[at])));
    }
    body.append(span);
  }
  return [tokens, blocks];
}

const swatches = (classes) => el("span", { class: "ramp", "aria-hidden": "true" }, ...classes.map((name) => el("i", { class: `t ${name}` })));

function legend(all, tokens, shade, scale) {
  const counts = all.authors.map((_, author) => tokens.filter((t) => t.author === author).length);
  const authors = all.authors.map((name, k) => (counts[k] ? el("span", { class: `span ${name.toLowerCase()}` },
    el("span", { class: "name" }, name.toLowerCase()), el("span", { class: "quiet" }, ` ${figure(counts[k])}`)) : null));
  const levels = Array.from({ length: LEVELS }, (_, i) => i + 1);
  const known = tokens.some((t) => t.advantage !== undefined && !Number.isNaN(t.advantage));
  let ramp;
  if (shade === "log-prob") ramp = ["probability 1", swatches([0, 1, 2, 3, 4].map((k) => `low${k}`)), "below 0.01"];
  else if (!known) ramp = ["no advantages stored"];
  else ramp = [`advantage −${figure(scale)}`, swatches([...levels.toReversed().map((k) => `minus${k}`), "zero", ...levels.map((k) => `plus${k}`)]), `+${figure(scale)}`];
  return el("div", { class: "legend" }, el("span", { class: "authors" }, ...authors), el("span", { class: "scale" }, ...ramp));
}

const some = (steps) => `steps ${steps.length > 8 ? [...steps.slice(0, 4), "…", ...steps.slice(-2)].join(", ") : steps.join(", ")}`;

function viewer(data) {
  const all = unpack(data.sample), { episodes } = all;
  if (!episodes.length) return [el("p", { class: "quiet" }, "The run holds no episodes that could be read.")];
  const steps = [...new Set(episodes.map((e) => e.step))];
  const shown = `${figure(episodes.length)} of ${figure(data.collected.episodes)} episodes are in this page: `
    + (episodes.length === data.collected.episodes ? "all." : `${some(steps)} (${steps.length} of ${data.collected.steps} steps).`);

  // One scale for all episodes of a step, so that their colours compare.
  const scales = new Map(steps.map((step) => [step, 0]));
  episodes.forEach((episode, i) => {
    const from = all.starts[i].policy, to = all.starts[i + 1]?.policy ?? all.advantages.length;
    for (let k = from; k < to; k++) {
      const size = Math.abs(all.advantages[k]);
      if (size > scales.get(episode.step)) scales.set(episode.step, size);
    }
  });

  const choice = (id, label, options) => [el("label", { for: id }, label), el("select", { id }, ...options.map(([value, text]) => el("option", { value }, text)))];
  const endings = [...new Set(episodes.map((e) => e.ending))];
  const controls = el("div", { class: "controls" },
    ...[["pick-step", "Step", [["", "all"], ...steps.map((s) => [s, s])]],
      ["pick-group", "Group", [["", "all"]]],
      ["pick-success", "Outcome", [["", "all"], ["true", "succeeded"], ["false", "failed"], ["null", "not known"]]],
      ["pick-ending", "Ending", [["", "all"], ...endings.map((e) => [e, words(e)])]],
      ["pick-shade", "Shade policy tokens by", [["advantage", "advantage"], ["log-prob", "log-prob"]]],
    ].map((c) => el("span", {}, ...choice(...c))));
  const [step, group, success, ending, shade] = controls.querySelectorAll("select");
  step.value = String(steps.at(-1));
  if (!episodes.some((e) => e.credited)) shade.value = "log-prob";

  const list = el("div", { id: "episode-list", role: "listbox", tabindex: "0", "aria-label": "Episodes; up and down arrow keys choose" });
  const position = el("span", { class: "quiet", id: "position", "aria-live": "polite" });
  const detail = el("article", { id: "episode", "aria-label": "Episode" });
  const tooltip = el("dl", { id: "tip", role: "tooltip", hidden: true });
  let found = [], chosen = -1, tokens = [];

  const fillGroups = () => {
    const names = [...new Set(episodes.filter((e) => !step.value || String(e.step) === step.value).map((e) => e.group))];
    group.replaceChildren(el("option", { value: "" }, "all"), ...names.map((name) => el("option", { value: name }, name)));
  };
  const filter = () => {
    found = episodes.flatMap((e, i) => ((!step.value || String(e.step) === step.value) && (!group.value || e.group === group.value)
      && (!success.value || String(e.success) === success.value) && (!ending.value || e.ending === ending.value) ? [i] : []));
    list.replaceChildren(...found.map((i) => {
      const e = episodes[i], mark = e.success === null ? "?" : e.success ? "✓" : "✗";
      return el("div", { role: "option", id: `e${i}`, "data-i": i, class: `row ${mark === "✓" ? "good" : "poor"}` },
        el("span", { class: "mark", "aria-label": { "✓": "succeeded", "✗": "failed", "?": "outcome not known" }[mark] }, mark),
        el("span", { class: "id" }, e.id), el("span", { class: "quiet" }, `${figure(e.reward)} · ${words(e.ending)} · ${e.turns.length} turns`));
    }));
    show(found.includes(chosen) ? chosen : found[0] ?? -1);
  };
  const show = (index) => {
    chosen = index;
    tooltip.hidden = true;
    for (const row of list.children) row.setAttribute("aria-selected", String(row.dataset.i === String(index)));
    position.textContent = found.length ? `${found.indexOf(index) + 1} of ${found.length}` : "No episode matches.";
    if (index < 0) { list.removeAttribute("aria-activedescendant"); detail.replaceChildren(); return; }
    list.setAttribute("aria-activedescendant", `e${index}`);
    const row = byId(`e${index}`);
    if (row) list.scrollTop = Math.min(row.offsetTop, Math.max(list.scrollTop, row.offsetTop + row.offsetHeight - list.clientHeight));
    const scale = scales.get(episodes[index].step) || 1;
    const [known, blocks] = transcript(all, index, shade.value, scale);
    tokens = known;
    detail.replaceChildren(el("h3", {}, episodes[index].id), facts(episodes[index]), legend(all, tokens, shade.value, scale),
      ...(blocks.length ? blocks : [el("p", { class: "quiet" }, "This episode ended before its first token.")]));
  };
  const move = (by) => { if (found.length) show(found[Math.max(0, Math.min(found.length - 1, found.indexOf(chosen) + by))]); };

  step.addEventListener("change", () => { fillGroups(); filter(); });
  for (const select of [group, success, ending]) select.addEventListener("change", filter);
  shade.addEventListener("change", () => show(chosen));
  list.addEventListener("click", (event) => { const row = event.target.closest(".row"); if (row) show(Number(row.dataset.i)); });
  list.addEventListener("keydown", (event) => {
    const by = { ArrowUp: -1, ArrowDown: 1, Home: -Infinity, End: Infinity }[event.key];
    if (by !== undefined) { event.preventDefault(); move(by); }
  });

  const explain = (node) => {
    tooltip.replaceChildren(...tip(tokens[Number(node.dataset.i)], all.authors));
    tooltip.hidden = false;
    const at = node.getClientRects()[0] ?? node.getBoundingClientRect(), box = tooltip.getBoundingClientRect();
    const above = at.bottom + 8 + box.height > innerHeight;
    tooltip.style.left = `${Math.max(8, Math.min(at.left, innerWidth - box.width - 8))}px`;
    tooltip.style.top = `${above ? Math.max(8, at.top - box.height - 8) : at.bottom + 8}px`;
  };
  const tokenAt = (event) => event.target.closest("#episode .t[data-i]");
  const hide = () => { tooltip.hidden = true; };
  detail.addEventListener("pointerover", (event) => { const node = tokenAt(event); if (node) explain(node); else hide(); });
  detail.addEventListener("pointerleave", hide);
  detail.addEventListener("focusin", (event) => {
    const node = tokenAt(event);
    if (!node) return;
    for (const other of detail.querySelectorAll(".t[tabindex='0']")) other.setAttribute("tabindex", "-1");
    node.setAttribute("tabindex", "0");
    node.setAttribute("aria-describedby", "tip");
    explain(node);
  });
  detail.addEventListener("focusout", (event) => { hide(); event.target.removeAttribute("aria-describedby"); });
  detail.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key], node = tokenAt(event);
    if (event.key === "Escape") hide();
    if (by === undefined || !node) return;
    event.preventDefault();
    detail.querySelector(`.t[data-i="${Number(node.dataset.i) + by}"]`)?.focus();
  });
  addEventListener("scroll", () => {
    const focused = document.activeElement.closest("#episode .t[data-i]");
    if (focused) explain(focused); else hide();
  }, { passive: true });

  const step_by = (by, text, label) => el("button", { type: "button", "aria-label": label, click: () => move(by) }, text);
  fillGroups();
  filter();
  return [el("p", { class: "quiet", id: "shown" }, shown), controls,
    el("div", { class: "split" },
      el("div", { class: "side" }, el("div", { class: "stepper" }, step_by(-1, "←", "Previous episode"), position, step_by(1, "→", "Next episode")), list),
      detail),
    tooltip];
}
