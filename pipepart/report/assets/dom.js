// Small helpers: elements, numbers as text, the tooltip. Text only ever enters the page as text nodes.
(function (pp) {
  "use strict";
  const SVG = "http://www.w3.org/2000/svg";

  function fill(node, attributes, children) {
    for (const [key, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else if (key === "colour") node.style.setProperty("--c", value);
      else if (key === "width%") node.style.width = `${value}%`;
      else if (key === "left%") node.style.left = `${value}%`;
      else node.setAttribute(key, value === true ? "" : String(value));
    }
    for (const child of children.flat(Infinity)) {
      if (child === null || child === undefined || child === false) continue;
      node.append(child.nodeType ? child : String(child));
    }
    return node;
  }
  pp.h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
  pp.s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

  pp.stageColour = (stage) => `var(--s${stage % 16})`;

  const digits = (value) => (value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2));
  pp.seconds = function (value) {
    if (value === null || value === undefined || !isFinite(value)) return "-";
    if (value === 0) return "0";
    if (Math.abs(value) >= 1) return `${digits(value)} s`;
    if (Math.abs(value) >= 1e-3) return `${digits(value * 1e3)} ms`;
    return `${digits(value * 1e6)} us`;
  };
  pp.bytes = function (value) {
    if (value === null || value === undefined || !isFinite(value)) return "-";
    for (const unit of ["B", "KB", "MB", "GB"]) {
      if (value < 1000 || unit === "GB") return unit === "B" ? `${Math.round(value)} B` : `${digits(value)} ${unit}`;
      value /= 1000;
    }
  };
  pp.percent = (value) => (value === null || value === undefined || !isFinite(value) ? "-" : `${(100 * value).toFixed(1)} %`);
  pp.count = function (value) {
    if (value === null || value === undefined || !isFinite(value)) return "-";
    if (value >= 1e9) return `${digits(value / 1e9)} G`;
    if (value >= 1e6) return `${digits(value / 1e6)} M`;
    if (value >= 1e4) return `${digits(value / 1e3)} k`;
    return value >= 100 || Number.isInteger(value) ? String(Math.round(value)) : digits(value);
  };
  pp.plural = (n, word) => `${n} ${word}${n === 1 ? "" : word.endsWith("h") ? "es" : "s"}`;

  /** Names that are too long keep their end, which distinguishes them better than the beginning. */
  pp.shorten = (text, length) => {
    const letters = Array.from(text);
    return letters.length <= length ? text : `…${letters.slice(letters.length - length + 1).join("")}`;
  };

  const tip = () => document.getElementById("tip");
  pp.showTip = function (text, x, y) {
    const box = tip();
    box.textContent = text;
    box.hidden = false;
    const w = box.offsetWidth, t = box.offsetHeight;
    box.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - w - 6))}px`;
    box.style.top = `${y + 18 + t > innerHeight ? Math.max(4, y - t - 10) : y + 18}px`;
  };
  pp.hideTip = () => { tip().hidden = true; };

  /** A legend of [css colour, text, class]. */
  pp.legend = (items) => pp.h("div", { class: "legend" }, items.map(([colour, text, kind]) =>
    pp.h("span", {}, pp.h("i", { colour, class: kind || null }), text)));

  pp.button = (text, action, attributes) => pp.h("button", { type: "button", onclick: action, ...(attributes || {}) }, text);

  pp.check = function (text, on, changed, id) {
    const input = pp.h("input", { type: "checkbox", id, onchange: () => changed(input.checked) });
    input.checked = on;
    return pp.h("label", {}, input, text);
  };
})((globalThis.pipepart = globalThis.pipepart || {}));
