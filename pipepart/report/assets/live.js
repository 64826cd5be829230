// The page of a running job: asks for its state every two seconds, and loads the report again when the trace is new.
(function () {
  "use strict";
  const SVG = "http://www.w3.org/2000/svg";
  const at = (id) => document.getElementById(id);
  let shown = null;

  const number = (value) => (value === 0 || (Math.abs(value) >= 1e-3 && Math.abs(value) < 1e6) ? String(+value.toPrecision(5)) : value.toExponential(3));
  const bytes = (value) => (value >= 1e9 ? `${(value / 1e9).toFixed(2)} GB` : `${(value / 1e6).toFixed(1)} MB`);

  function card(name, value, drawing) {
    const box = document.createElement("div"), head = document.createElement("span"), big = document.createElement("b");
    box.className = "card";
    head.textContent = name;
    big.textContent = value;
    box.append(head, big);
    if (drawing) box.append(drawing);
    return box;
  }

  function curve(steps, values) {
    const points = steps.map((step, i) => [step, values[i]]).filter((point) => point[1] !== null);
    const drawing = document.createElementNS(SVG, "svg"), line = document.createElementNS(SVG, "polyline");
    const xs = points.map((point) => point[0]), ys = points.map((point) => point[1]);
    const left = Math.min(...xs), wide = Math.max(...xs) - left || 1, low = Math.min(...ys), high = Math.max(...ys) - low || 1;
    line.setAttribute("points", points.map(([x, y]) => `${(100 * (x - left)) / wide},${38 - (36 * (y - low)) / high}`).join(" "));
    drawing.setAttribute("viewBox", "0 0 100 40");
    drawing.setAttribute("preserveAspectRatio", "none");
    drawing.append(line);
    return [points.length ? number(ys[ys.length - 1]) : "-", points.length > 1 ? drawing : null];
  }

  function show(state) {
    at("title").textContent = state.title;
    const of = state.of === null ? "" : ` of ${state.of}`;
    at("state").textContent = `step ${state.step}${of}` + (state.runs ? "" : `, ${state.ended || "the job has ended"}`);
    at("state").className = state.runs ? "" : "ended";
    at("curves").replaceChildren(...Object.keys(state.values).sort().map((name) => card(name, ...curve(state.steps, state.values[name]))));
    const memory = state.memory.map((value, stage) => card(`peak memory of stage ${stage}`, bytes(value)));
    const figures = Object.keys(state.figures).sort().map((name) => card(name, number(state.figures[name])));
    at("figures").replaceChildren(...memory, ...figures);
    if (state.report !== null && state.report !== shown) {
      const frame = at("report"), before = frame.hidden ? 0 : frame.contentWindow.scrollY;
      shown = state.report;
      frame.onload = () => frame.contentWindow.scrollTo(0, before);
      frame.src = `report.html?${encodeURIComponent(state.report)}`;
      frame.hidden = false;
      at("note").hidden = true;
    }
  }

  async function renew() {
    try {
      const answer = await fetch("state.json", { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.status);
      const state = await answer.json();
      show(state);
      if (state.runs) setTimeout(renew, 2000);
    } catch (error) {
      at("state").textContent = "the viewer has ended";
      at("state").className = "ended";
    }
  }
  renew();
})();
