"use strict";
// Elements, and numbers as people read them. Text only ever becomes text: nothing here reads HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) node.append(child);
  }
  return node;
}

const el = (name, attributes, ...children) => fill(document.createElement(name), attributes, children);
const svg = (name, attributes, ...children) => fill(document.createElementNS(SVG, name), attributes, children);

/** Text in which `commands` in backquotes are code. */
function prose(text) {
  return text.split("`").map((part, index) => (index % 2 ? el("code", null, part) : part));
}

let numIds = 0;
const newId = (stem) => `${stem}-${++numIds}`;
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function digits(value, most = 3) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  const decimals = Math.max(0, most - 1 - Math.floor(Math.log10(size)));
  return value.toLocaleString("en-US", { maximumFractionDigits: Math.min(decimals, 12) });
}

const NOT_MEASURED = "not measured";
const format = {
  count: (value) => (isNumber(value) ? value.toLocaleString("en-US") : "–"),
  quantity(value) {
    if (!isNumber(value)) return "–";
    for (const [limit, unit] of [[1e24, "Y"], [1e21, "Z"], [1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
      if (Math.abs(value) >= limit * 0.9995) return `${digits(value / limit)} ${unit}`;
    }
    return Math.abs(value) < 1e-3 && value !== 0 ? value.toExponential(2) : digits(value);
  },
  loss: (value) => (isNumber(value) ? (Math.abs(value) >= 1e4 ? value.toExponential(2) : value.toFixed(4)) : "–"),
  small: (value) => (!isNumber(value) ? "–" : value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e5) ? value.toExponential(2) : digits(value)),
  percent: (value) => (isNumber(value) ? `${(100 * value).toFixed(Math.abs(value) < 0.001 && value !== 0 ? 3 : 1)} %` : "–"),
  seconds(value) {
    if (!isNumber(value)) return "–";
    const size = Math.abs(value);
    if (size === 0) return "0 s";
    if (size < 1e-3) return `${digits(value * 1e6)} µs`;
    if (size < 1) return `${digits(value * 1e3)} ms`;
    return size < 59.95 ? `${digits(value)} s` : format.duration(value);
  },
  duration(value) {
    if (!isNumber(value)) return "–";
    const whole = Math.round(value);
    if (whole === 0) return "0";
    const pad = (number) => String(number).padStart(2, "0");
    const [days, hours, minutes, rest] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60, whole % 60];
    if (days) return `${days} d ${pad(hours)}:${pad(minutes)} h`;
    return hours ? `${hours}:${pad(minutes)}:${pad(rest)} h` : `${minutes}:${pad(rest)} min`;
  },
  bytes(value) {
    if (!isNumber(value)) return "–";
    for (const [limit, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
      if (value >= limit * 0.9995) return `${digits(value / limit)} ${unit}`;
    }
    return `${value} B`;
  },
  ratio: (value) => (isNumber(value) ? `${value.toFixed(2)} ×` : "–"),
  value: (value) => (value === null || value === undefined ? "null" : String(value)),
  when: (value) => (isNumber(value) && Math.abs(value) <= 8.64e12 ? new Date(value * 1000).toISOString().replace("T", " ").slice(0, 16) + " UTC" : "–"),
};

/** A section of the page with its heading, which names it. */
function section(id, title, ...children) {
  return el("section", { class: "section", id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), children);
}

/** A table behind a plot, made when somebody opens it. */
function behind(title, make) {
  const details = el("details", null, el("summary", null, title));
  details.addEventListener("toggle", () => {
    if (details.open && details.childElementCount === 1) details.append(make());
  });
  return details;
}
