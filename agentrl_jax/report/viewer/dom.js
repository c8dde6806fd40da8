// Elements are made by calls and text is always a text node: nothing a run wrote can become markup.

const fill = (node, attributes, children) => {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === false || value === undefined) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
};

const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
const byId = (id) => document.getElementById(id);

const isNumber = (value) => typeof value === "number";
const sum = (values) => values.reduce((a, b) => a + b, 0);
const words = (name) => name.replace(/^(rollout|train|eval|time)\//, "").replaceAll("_", " ");

// A number for people: thousands apart, four significant digits. Null is a dash; "nan", "inf" and "-inf" stay what they are.
function figure(value) {
  if (value === null || value === undefined) return "–";
  if (!isNumber(value)) return String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e9) return value.toLocaleString("en").replace("-", "−");
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replaceAll("-", "−");
  return value.toLocaleString("en", { maximumSignificantDigits: 4 }).replace("-", "−");
}

// Characters that would not show, or would move what stands around them: controls, zero-width, direction marks.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/;
const EACH_HIDDEN = new RegExp(`(${HIDDEN.source})`, "g");

// A value as JSON in which every character shows.
const quote = (value) => JSON.stringify(value).replace(EACH_HIDDEN, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);

const percent = (value) => `${(100 * value).toFixed(1)} %`;

const table = (head, rows, attributes = {}) =>
  el("table", attributes,
    el("thead", {}, el("tr", {}, ...head.map((text) => el("th", { scope: "col" }, text)))),
    el("tbody", {}, ...rows.map(([first, ...rest]) =>
      el("tr", {}, el("th", { scope: "row" }, first), ...rest.map((cell) => el("td", {}, cell))))));
