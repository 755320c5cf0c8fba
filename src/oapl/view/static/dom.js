// Elements, numbers and texts. Text reaches the page by textContent alone.

const SVG = "http://www.w3.org/2000/svg";

export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export function put(node, ...children) {
  node.replaceChildren(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));
}

export function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(1) : String(+value.toPrecision(digits));
}

export function ago(seconds) {
  if (seconds === null || seconds === undefined) return "never";
  const age = Math.max(0, Date.now() / 1000 - seconds);
  if (age < 100) return `${Math.round(age)} s ago`;
  if (age < 6000) return `${Math.round(age / 60)} min ago`;
  if (age < 172800) return `${Math.round(age / 3600)} h ago`;
  return `${Math.round(age / 86400)} days ago`;
}

// What draws nothing, turns the writing round or moves it would make a text look like another: it is shown by its number.
const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff]|[\u{e0000}-\u{e0fff}]/gu;

export function visible(text) {
  const parts = [];
  let end = 0;
  for (const match of text.matchAll(HIDDEN)) {
    if (match.index > end) parts.push(text.slice(end, match.index));
    const code = match[0].codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    parts.push(el("span", { class: "code", title: `the character U+${code}` }, `U+${code}`));
    end = match.index + match[0].length;
  }
  if (end < text.length) parts.push(text.slice(end));
  return parts;
}

export function say(text) {
  document.getElementById("says").textContent = text;
}

export async function ask(name, query = {}, signal = undefined) {
  const given = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const answer = await fetch(`/api/${name}?${new URLSearchParams(given)}`, { signal });
  const text = await answer.text();
  let value;
  try {
    value = JSON.parse(text);
  } catch {
    value = { error: text };
  }
  if (!answer.ok) throw new Error(value.error || `answer ${answer.status}`);
  return value;
}

// Addresses: #page?name=value&…

export function address(page, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return `#${page}?${new URLSearchParams(given)}`;
}

export function place() {
  const [page, query] = location.hash.slice(1).split("?");
  return { page, query: Object.fromEntries(new URLSearchParams(query || "")) };
}

export function go(query, { replace = false } = {}) {
  const here = place();
  const next = address(here.page, { ...here.query, ...query });
  if (next === location.hash) return;
  if (replace) location.replace(next);
  else location.hash = next;
}
