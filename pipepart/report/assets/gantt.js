// Timelines as Gantt charts, one above the other on the same scale: actions, idle time, the critical path, live
// activations, and messages: receives above the compute of a stage, sends below it, arrows from one to the other. Only
// visible events are drawn; very narrow ones are merged with their neighbours.
(function (pp) {
  "use strict";
  const { h, s } = pp;
  const MANY = 6000, ARROWS = 500, STRIP = 4, GAP = 5;

  function niceStep(span, count) {
    const raw = span / Math.max(1, count), power = Math.pow(10, Math.floor(Math.log10(raw)));
    for (const factor of [1, 2, 5, 10]) if (factor * power >= raw) return factor * power;
    return 10 * power;
  }

  class Gantt {
    constructor(root, timelines, options) {
      this.options = { arrows: true, critical: true, memory: true, ...(options || {}) };
      this.svg = s("svg", { class: "gantt", tabindex: 0, role: "img", "aria-label": "Gantt chart of the schedule" });
      this.frame = h("div", { class: "frame" }, this.svg);
      this.status = h("span", { class: "soft", "aria-live": "polite" });
      const toggle = (name, text) => pp.check(text, this.options[name], (on) => { this.options[name] = on; this.draw(); }, options && options.id ? `${options.id}-${name}` : null);
      this.tools = h("div", { class: "tools" },
        h("span", { class: "group" },
          pp.button("−", () => this.zoom(1 / 1.6), { "aria-label": "Zoom out", "data-zoom": "out" }),
          pp.button("+", () => this.zoom(1.6), { "aria-label": "Zoom in", "data-zoom": "in" }),
          pp.button("fit", () => this.fit(), { "aria-label": "Show the whole step", "data-zoom": "fit" })),
        toggle("arrows", "messages"), toggle("critical", "critical path"), toggle("memory", "live activations"), this.status);
      root.append(this.tools, this.frame);
      this.setTimelines(timelines);
      this.listen();
      new ResizeObserver(() => { if (this.frame.clientWidth !== this.width) this.draw(); }).observe(this.frame);
    }

    setTimelines(timelines) {
      this.parts = timelines.map(({ label, timeline }) => {
        const receives = pp.impliedReceives(timeline), events = [...timeline.events, ...receives];
        const critical = new Set(pp.criticalPath(timeline)), flows = pp.flows(timeline, receives), near = new Map();
        const add = (e, flow) => (near.get(e) || near.set(e, []).get(e)).push(flow);
        for (const flow of flows) for (const e of flow) if (e) add(e, flow);
        return { label, timeline, events, critical, flows, near, curves: pp.memoryCurves(timeline) };
      });
      this.whole = Math.max(1e-12, ...this.parts.map((p) => p.timeline.stepTime));
      this.from = 0;
      this.to = this.whole;
      this.draw();
    }

    fit() { this.from = 0; this.to = this.whole; this.draw(); }

    zoom(factor, at = (this.from + this.to) / 2) {
      const span = Math.min(this.whole, Math.max(this.whole / 20000, (this.to - this.from) / factor));
      const share = (at - this.from) / (this.to - this.from);
      this.from = Math.min(Math.max(0, at - share * span), this.whole - span);
      this.to = this.from + span;
      this.draw();
    }

    pan(seconds) {
      const span = this.to - this.from;
      this.from = Math.min(Math.max(0, this.from + seconds), this.whole - span);
      this.to = this.from + span;
      this.draw();
    }

    listen() {
      const svg = this.svg, pointers = new Map();
      const timeAt = (clientX) => {
        const x = clientX - svg.getBoundingClientRect().left - this.left;
        return this.from + (x / this.plot) * (this.to - this.from);
      };
      svg.addEventListener("wheel", (event) => {
        if (!event.ctrlKey && !event.metaKey) return;
        event.preventDefault();
        this.zoom(Math.exp(-event.deltaY / 240), timeAt(event.clientX));
      }, { passive: false });
      svg.addEventListener("dblclick", (event) => this.zoom(2.5, timeAt(event.clientX)));
      svg.addEventListener("pointerdown", (event) => { pointers.set(event.pointerId, event.clientX); this.moved = false; });
      const release = (event) => pointers.delete(event.pointerId);
      addEventListener("pointerup", release);
      addEventListener("pointercancel", release);
      svg.addEventListener("pointermove", (event) => {
        if (!pointers.has(event.pointerId)) return this.hover(event);
        const before = pointers.get(event.pointerId);
        if (pointers.size === 2) {
          const other = [...pointers].find(([id]) => id !== event.pointerId)[1];
          const was = Math.abs(before - other), is = Math.abs(event.clientX - other);
          if (was > 4 && is > 4) this.zoom(is / was, timeAt((event.clientX + other) / 2));
        } else if (Math.abs(event.clientX - before) > 0) {
          this.moved = true;
          this.pan(((before - event.clientX) / this.plot) * (this.to - this.from));
        }
        pointers.set(event.pointerId, event.clientX);
      });
      svg.addEventListener("pointerleave", () => { pp.hideTip(); this.mark(null); });
      svg.addEventListener("keydown", (event) => {
        const span = this.to - this.from;
        const keys = { "+": () => this.zoom(1.6), "=": () => this.zoom(1.6), "-": () => this.zoom(1 / 1.6), 0: () => this.fit(), ArrowLeft: () => this.pan(-span / 8), ArrowRight: () => this.pan(span / 8) };
        if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
      });
    }

    hover(event) {
      const drawn = this.drawn.get(event.target);
      if (!drawn) { pp.hideTip(); this.mark(null); return; }
      const { event: e, part, count } = drawn;
      const kind = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient", SEND: "send", RECV: "receive", REDUCE: "reduce" }[e.kind];
      const where = e.kind === "SEND" ? `chunk ${e.chunk} to chunk ${e.peer}` : e.kind === "RECV" ? `chunk ${e.chunk} from chunk ${e.peer}` : `chunk ${e.chunk}`;
      const text = count > 1
        ? `${count} actions on stage ${e.stage}; zoom in to see them`
        : `${kind}, micro-batch ${e.k}\nstage ${e.stage}, ${where}, ${part.label}\n${pp.seconds(e.start)} to ${pp.seconds(e.end)}: ${pp.seconds(e.end - e.start)}${part.critical.has(e) ? "\non the critical path" : ""}`;
      pp.showTip(text, event.clientX, event.clientY);
      this.mark(event.target);
    }

    mark(element) {
      if (this.marked === element) return;
      if (this.marked) this.marked.classList.remove("hover");
      this.marked = element;
      this.top.replaceChildren();
      if (!element) return;
      element.classList.add("hover");
      const { event, part } = this.drawn.get(element);
      for (const flow of part.near.get(event) || []) this.top.append(this.arrow(part, flow, "hover"));
    }

    x(time) { return this.left + ((time - this.from) / (this.to - this.from)) * this.plot; }

    /** The places of all elements, for the present width. */
    measure() {
      this.width = this.frame.clientWidth || 800;
      const narrow = this.width < 560, most = Math.max(...this.parts.map((p) => p.timeline.stages));
      this.left = narrow ? 30 : 64;
      this.right = this.options.memory ? 62 : 12;
      this.plot = Math.max(60, this.width - this.left - this.right);
      this.lane = most > 12 ? 15 : 20;
      let y = 26;
      for (const part of this.parts) {
        part.title = y + 12;
        y += 20;
        part.rows = [];
        for (let stage = 0; stage < part.timeline.stages; stage++) {
          part.rows.push(y + STRIP);
          y += this.lane + 2 * STRIP + GAP;
        }
        part.memory = null;
        if (this.options.memory) {
          y += 4;
          part.memoryTitle = y + 9;
          y += 15;
          part.memory = [];
          for (let stage = 0; stage < part.timeline.stages; stage++) { part.memory.push(y); y += 22; }
        }
        part.bottom = y;
        y += 10;
      }
      this.height = y;
    }

    draw() {
      this.measure();
      const { svg } = this;
      svg.setAttribute("width", this.width);
      svg.setAttribute("height", this.height);
      svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
      this.drawn = new Map();
      this.marked = null;
      this.top = s("g", {});
      const id = `clip${(Gantt.count = (Gantt.count || 0) + 1)}`;
      const plot = s("g", { "clip-path": `url(#${id})` });
      svg.replaceChildren(
        s("defs", {},
          s("clipPath", { id }, s("rect", { x: this.left, y: 0, width: this.plot, height: this.height })),
          s("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
            s("rect", { width: 2, height: 6, fill: "var(--hatch)" })),
          s("marker", { id: "arrow", viewBox: "0 0 6 6", refX: 5, refY: 3, markerWidth: 5, markerHeight: 5, orient: "auto" },
            s("path", { d: "M0 0L6 3L0 6z", fill: "context-stroke" }))),
        this.axis(), plot);
      let arrows = 0, hidden = false;
      for (const part of this.parts) {
        svg.append(this.labels(part));
        plot.append(this.lanes(part), this.events(part));
        if (part.memory) plot.append(this.curves(part));
        if (this.options.arrows || this.options.critical) {
          const seen = part.flows.filter((f) => f[1].start >= this.from && f[0].end <= this.to);
          const critical = (f) => this.options.critical && part.critical.has(f[1]) && (f[2] ? part.critical.has(f[2]) : part.critical.has(f[0]));
          const all = this.options.arrows && seen.length <= ARROWS;
          hidden = hidden || (this.options.arrows && !all);
          for (const flow of seen) {
            const red = critical(flow);
            if (all || red) { plot.append(this.arrow(part, flow, red ? "critical" : "")); arrows++; }
          }
        }
      }
      plot.append(this.top);
      const share = (this.to - this.from) / this.whole;
      this.status.textContent = `${share < 0.999 ? `${pp.seconds(this.to - this.from)} of ${pp.seconds(this.whole)} visible` : ""}${hidden ? `${share < 0.999 ? "; " : ""}zoom in for the messages` : ""}`;
      svg.dataset.arrows = arrows;
    }

    axis() {
      const group = s("g", {}), step = niceStep(this.to - this.from, this.plot / 72);
      for (let t = Math.ceil(this.from / step) * step; t <= this.to + step * 1e-6; t += step) {
        const x = this.x(t);
        if (x < this.left - 1 || x > this.left + this.plot + 1) continue;
        const anchor = x < this.left + 20 ? "start" : x > this.left + this.plot - 26 ? "end" : "middle";
        group.append(s("line", { class: "grid", x1: x, x2: x, y1: 20, y2: this.height - 6 }),
          s("text", { class: "soft", x, y: 14, "font-size": 11, "text-anchor": anchor }, Math.abs(t) < step * 1e-6 ? "0" : pp.seconds(t)));
      }
      return group;
    }

    labels(part) {
      const group = s("g", {}), narrow = this.left < 40;
      group.append(s("text", { x: 8, y: part.title, "font-size": 12, "font-weight": 600 }, `${part.label}: ${pp.seconds(part.timeline.stepTime)}, bubble ${pp.percent(part.timeline.bubble)}`));
      part.rows.forEach((y, stage) => {
        group.append(s("rect", { x: 8, y: y + 2, width: 5, height: this.lane - 4, rx: 1, fill: pp.stageColour(stage) }),
          s("text", { class: "soft", x: 17, y: y + this.lane / 2 + 4, "font-size": 11 }, narrow ? stage : `stage ${stage}`));
      });
      if (part.memory) {
        const bytes = part.timeline.activation.length > 0;
        group.append(s("text", { class: "soft", x: 8, y: part.memoryTitle, "font-size": 11 }, `live activations, ${part.label}${bytes ? "" : " (micro-batches)"}, and their peak`));
        part.memory.forEach((y, stage) => group.append(s("text", { class: "soft", x: 17, y: y + 15, "font-size": 11 }, narrow ? stage : `stage ${stage}`)));
      }
      return group;
    }

    lanes(part) {
      const group = s("g", {}), end = Math.min(this.x(part.timeline.stepTime), this.left + this.plot);
      const width = Math.max(0, end - this.left);
      for (const y of part.rows) {
        group.append(s("rect", { class: "lane", x: this.left, y, width, height: this.lane }),
          s("rect", { class: "idle", x: this.left, y, width, height: this.lane }));
      }
      return group;
    }

    events(part) {
      const group = s("g", { "data-timeline": part.label }), visible = [];
      for (const e of part.events) if (e.end >= this.from && e.start <= this.to) visible.push(e);
      const merge = visible.length > MANY, open = new Map();
      for (const e of visible) {
        const compute = pp.COMPUTE.has(e.kind), x = this.x(e.start), width = Math.max(0.4, this.x(e.end) - x);
        const y = part.rows[e.stage] + (compute ? 0 : e.kind === "RECV" ? -STRIP : this.lane), height = compute ? this.lane : STRIP;
        if (merge && width < 1.2) {
          const key = `${e.stage} ${e.kind}`, last = open.get(key);
          if (last && x - last.right < 1) {
            last.right = Math.max(last.right, x + width);
            last.info.count++;
            last.element.setAttribute("width", last.right - last.x);
            continue;
          }
        }
        const critical = this.options.critical && part.critical.has(e);
        const thin = critical && width < 7;  // an outline would hide the event
        const element = s("rect", { class: `ev ${e.kind}${critical ? " critical" : ""}${thin ? " thin" : ""}`, x, y, width, height, "data-action": pp.actionName(e), "data-stage": e.stage });
        const info = { event: e, part, count: 1 };
        this.drawn.set(element, info);
        group.append(element);
        if (thin && compute) group.append(s("rect", { class: "mark", x, y: y + height - 3, width, height: 3 }));
        if (merge) open.set(`${e.stage} ${e.kind}`, { element, info, x, right: x + width });
        const left = Math.max(x, this.left), right = Math.min(x + width, this.left + this.plot), label = String(e.k);
        if (compute && right - left > label.length * 6.5 + 4)
          group.append(s("text", { class: `on ${e.kind}`, x: (left + right) / 2, y: y + height / 2 + 3.8 }, label));
      }
      return group;
    }

    curves(part) {
      const group = s("g", {}), all = part.curves.flat();
      part.peaks = s("g", {});
      this.svg.append(part.peaks);
      const peak = all.reduce((top, p) => Math.max(top, p[1]), 0) || 1, bytes = part.timeline.activation.length > 0;
      part.curves.forEach((curve, stage) => {
        const base = part.memory[stage] + 19, tall = 17, points = [];
        let level = 0;
        for (const [time, value] of curve) {
          points.push(`${this.x(time).toFixed(1)} ${(base - (level / peak) * tall).toFixed(1)}`);
          level = value;
          points.push(`${this.x(time).toFixed(1)} ${(base - (level / peak) * tall).toFixed(1)}`);
        }
        const end = this.x(part.timeline.stepTime).toFixed(1);
        points.push(`${end} ${(base - (level / peak) * tall).toFixed(1)}`);
        group.append(s("path", { class: "mem", "data-memory": stage, colour: pp.stageColour(stage), d: `M${this.x(0).toFixed(1)} ${base}L${points.join("L")}L${end} ${base}z` }));
        const top = curve.reduce((most, p) => Math.max(most, p[1]), 0), text = bytes ? pp.bytes(top) : pp.count(top);
        part.peaks.append(s("text", { class: "soft", x: this.left + this.plot + 6, y: base - 3, "font-size": 11 }, text));
      });
      return group;
    }

    /** The arrow of a message, from its send (or the end of its producer) to its arrival (the end of its receive). */
    arrow(part, [from, to, send, receive], kind) {
      const down = to.stage > from.stage, edge = (stage, below) => part.rows[stage] + (below ? this.lane + STRIP : -STRIP);
      const left = send ? send.start : from.end, there = receive && receive.end > receive.start ? receive.end : to.start;
      const x1 = this.x(left).toFixed(1), x2 = this.x(Math.max(left, there)).toFixed(1);
      const y1 = edge(from.stage, down), y2 = edge(to.stage, !down), middle = (y1 + y2) / 2;
      return s("path", { class: `flow ${kind}`, "marker-end": "url(#arrow)", d: `M${x1} ${y1}C${x1} ${middle} ${x2} ${middle} ${x2} ${y2}` });
    }
  }

  pp.Gantt = Gantt;

  pp.renderSchedule = function (root, timelines) {
    const kinds = new Set(timelines.flatMap(({ timeline }) => timeline.events.map((e) => e.kind)));
    if (kinds.has("SEND")) kinds.add("RECV");
    const names = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient", SEND: "send (below)", RECV: "receive (above)", REDUCE: "gradient sum" };
    root.append(h("h2", {}, "Schedule"),
      h("p", { class: "note" }, "Numbers are micro-batches; arrows lead from a send to its receive. Drag to move; zoom with the buttons, a pinch, a double click or Ctrl and the wheel."),
      pp.legend([...Object.keys(names).filter((k) => kinds.has(k)).map((k) => [`var(--${k})`, names[k]]), ["", "idle", "hatched"], ["var(--critical)", "critical path"]]));
    const stages = Math.max(...timelines.map(({ timeline }) => timeline.stages));
    pp.mainGantt = new Gantt(root, timelines, { memory: stages <= 8, id: "gantt" });
  };
})((globalThis.pipepart = globalThis.pipepart || {}));
