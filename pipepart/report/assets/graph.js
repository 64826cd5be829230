// The graph view: nested boxes coloured by stage, cut edges with their bytes, search, zoom, details.
(function (pp) {
  "use strict";
  if (typeof document === "undefined") return;
  const { h, s } = pp;
  const PAD = 14, HEAD = 26, TALL = 42, FIRST = 48, MOST = 1500;

  const pen = document.createElement("canvas").getContext("2d"), widths = new Map();
  /** Width of a text in the font of the page; names are drawn at 12 px and bold, all other text at 10.5 px. */
  function textWidth(text, size) {
    const key = `${size} ${text}`;
    if (!widths.has(key)) {
      pen.font = `${size >= 12 ? 600 : 400} ${size}px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif`;
      widths.set(key, Math.ceil(pen.measureText(text).width) + 1);
    }
    return widths.get(key);
  }

  class GraphView {
    constructor(root, data) {
      this.data = data;
      this.plans = { A: data.plan, B: data.same_ops ? data.compare : null };
      this.which = "A";
      this.graph = pp.graphOf(data.graph);
      this.mode = data.graph.known ? "module" : "stage";
      this.trees = {};
      this.hits = new Set();
      this.world = s("g", {});
      this.svg = s("svg", { class: "canvas", tabindex: 0, role: "img", "aria-label": "Graph of the model" }, s("defs", {},
        s("marker", { id: "head", viewBox: "0 0 6 6", refX: 5.4, refY: 3, markerWidth: 6, markerHeight: 6, orient: "auto", markerUnits: "userSpaceOnUse" },
          s("path", { d: "M0 0L6 3L0 6z", fill: "context-stroke" }))), this.world);
      this.frame = h("div", { class: "frame" }, this.svg);
      this.details = h("aside", { class: "details", "aria-live": "polite" });
      this.found = h("div", { class: "chips", id: "graph-found" });
      this.build(root);
      this.view = { x: 0, y: 0, k: 1 };
      this.listen();
      this.use(this.mode);
      new ResizeObserver(() => { if (this.svg.clientWidth !== this.seenWidth) { this.seenWidth = this.svg.clientWidth; if (!this.touched) this.home(); } }).observe(this.frame);
    }

    get plan() { return this.plans[this.which]; }

    build(root) {
      const mode = (name, text) => pp.button(text, () => this.use(name), { "data-mode": name });
      this.search = h("input", { type: "search", id: "graph-search", placeholder: "search ops, modules, classes", "aria-label": "Search the graph",
        oninput: () => this.find(this.search.value), onkeydown: (event) => { if (event.key === "Enter") this.nextHit(); } });
      root.append(h("h2", {}, "Graph"),
        h("p", { class: "note" }, this.data.graph.known
          ? "Boxes are modules and ops, coloured by stage. + opens a module, − closes it; a click shows details. Red edges cross a cut, dashed ones pass over a chunk, dotted ones join tied weights."
          : "The plan has only the names of its ops. With graph.json beside the plan, this section shows modules, shapes and every edge."),
        h("div", { class: "tools" }, this.search,
          this.data.graph.known ? h("span", { class: "group" }, mode("module", "by module"), mode("stage", "by stage")) : null,
          this.plans.B ? h("span", { class: "group" }, ["A", "B"].map((p) => pp.button(`plan ${p}`, () => this.usePlan(p), { "data-plan": p }))) : null,
          h("span", { class: "group" },
            pp.button("−", () => this.zoom(1 / 1.4), { "aria-label": "Zoom out", "data-zoom": "out" }),
            pp.button("+", () => this.zoom(1.4), { "aria-label": "Zoom in", "data-zoom": "in" }),
            pp.button("fit", () => this.fit(), { "aria-label": "Fit the graph", "data-zoom": "fit" })),
          h("span", { class: "group" },
            pp.button("open more", () => this.openLevel(), { id: "graph-more" }), pp.button("close all", () => this.closeAll(), { id: "graph-close" })),
          (this.status = h("span", { class: "soft", role: "status" }))),
        this.found, h("div", { class: "graphgrid" }, this.frame, this.details));
      root.append(h("div", { class: "legend" }, Array.from({ length: this.data.plan.stages }, (_, n) =>
        h("span", {}, h("i", { colour: pp.stageColour(n) }), `stage ${n}`))));
    }

    use(mode) {
      this.mode = mode;
      const key = mode + this.which;
      if (!this.trees[key]) {
        this.trees[key] = pp.buildTree(this.graph, this.plan, mode);
        pp.openUpTo(this.trees[key], this.graph.known ? FIRST : 0);
      }
      this.tree = this.trees[key];
      for (const button of document.querySelectorAll("#graph [data-mode]")) button.setAttribute("aria-pressed", button.dataset.mode === mode);
      for (const button of document.querySelectorAll("#graph [data-plan]")) button.setAttribute("aria-pressed", button.dataset.plan === this.which);
      this.selected = null;
      this.render();
      this.home();
      this.explain(this.tree.root);
    }

    usePlan(which) { this.which = which; this.use(this.mode); }

    // ---- places

    nodeSize(node) {
      const sub = this.subtitle(node);
      const width = Math.max(textWidth(pp.shorten(node.label, 34), 12) + (node.children.length ? 50 : 24), textWidth(sub, 10.5) + (node.children.length ? 50 : 24), 84);
      return [Math.ceil(width), TALL];
    }

    subtitle(node) {
      const time = node.sum.forward + node.sum.backward, stages = [...node.stages.keys()].sort((a, b) => a - b);
      const where = stages.length === 1 ? `S${stages[0]}` : `S${stages[0]}–${stages[stages.length - 1]}`;
      const what = node.op >= 0 ? this.what(node) : pp.plural(node.sum.ops, "op");
      return [where, pp.shorten(what, 22), time ? pp.seconds(time) : ""].filter(Boolean).join(" · ");
    }

    /** The kind of an op: the class of its module, or its function; empty if its name contains it. */
    what(node) {
      const { graph: g } = this, word = g.kind(node.op) === "module" ? g.moduleClass(node.op) : g.target(node.op).split(".").pop();
      return node.label.startsWith(word) ? "" : word;
    }

    arrange(node, edges) {
      const mine = edges.get(node) || [], at = new Map(node.children.map((child, n) => [child, n]));
      for (const child of node.children) {
        if (child.open) this.arrange(child, edges);
        else [child.w, child.h] = this.nodeSize(child);
      }
      const plain = mine.map((e) => [e.from === "in" ? -1 : at.get(e.from), e.to === "out" ? -2 : at.get(e.to)]);
      const drawing = pp.layered(node.children.map((child) => ({ width: child.w, height: child.h })), plain);
      const top = node === this.tree.root ? 8 : HEAD + 12, wide = node === this.tree.root ? 0 : textWidth(pp.shorten(node.label, 40), 12) + 60 + textWidth(this.subtitle(node), 10.5);
      const spare = Math.max(0, (wide - drawing.width) / 2);
      node.children.forEach((child, n) => { child.x = drawing.place[n].x + PAD + spare; child.y = drawing.place[n].y + top; });
      node.w = drawing.width + 2 * PAD + 2 * spare;
      node.h = drawing.height + top + PAD;
      node.inX = drawing.inX + PAD + spare;
      node.outX = drawing.outX + PAD + spare;
      node.edges = mine.map((edge, n) => ({ edge, route: drawing.routes[n], dx: PAD + spare, dy: top }));
    }

    render() {
      const began = performance.now();
      let edges = pp.visibleEdges(this.tree, this.graph, this.plan);
      if (!this.graph.known && this.mode === "stage") edges = this.trafficEdges();
      this.arrange(this.tree.root, edges);
      this.elements = new Map();
      this.labels = s("g", {});
      this.tags = [];
      const lines = s("g", {}), frames = s("g", {}), boxes = s("g", {});
      const place = (node, x, y) => {
        node.X = x;
        node.Y = y;
        if (node !== this.tree.root) (node.open ? frames : boxes).append(this.box(node));
        if (node.open) {
          for (const child of node.children) place(child, x + child.x, y + child.y);
        }
      };
      place(this.tree.root, 0, 0);
      const inner = [];
      const joined = (node) => {
        for (const item of node.edges) inner.push([node, item]);
        for (const child of node.children) if (child.open) joined(child);
      };
      joined(this.tree.root);
      for (const [node, item] of inner) lines.append(this.edge(node, item));
      this.placeTags();
      this.world.replaceChildren(frames, this.tiedLines(), boxes, lines, this.labels);
      this.markHits();
      const shown = this.elements.size;
      this.status.textContent = `${shown} of ${this.tree.size - 1} boxes visible`;
      this.svg.dataset.nodes = shown;
      this.svg.dataset.milliseconds = Math.round(performance.now() - began);
    }

    /** The traffic between chunks in the plan, if the edges of ops are not known. */
    trafficEdges() {
      const byChunk = new Map(this.tree.root.children.map((node) => [node.chunk, node])), root = this.tree.root;
      return new Map([[root, this.plan.traffic.filter((t) => byChunk.has(t.source) && byChunk.has(t.target)).map((t) => ({
        from: byChunk.get(t.source), to: byChunk.get(t.target), container: root, producers: new Set(), crossing: new Map(), label: true,
        cut: this.plan.placement[t.source] !== this.plan.placement[t.target], skip: t.target > t.source + 1, bytes: t.forward_bytes, pairs: 1,
      }))]]);
    }

    // ---- drawing

    box(node) {
      const open = node.open && node.children.length > 0, group = node.children.length > 0;
      const element = s("g", { class: `node${group ? " group" : ""}${open ? " open" : ""}`, transform: `translate(${node.X.toFixed(1)} ${node.Y.toFixed(1)})`, "data-label": node.label, "data-path": node.path, "data-op": node.op >= 0 ? node.op : null, "data-stages": [...node.stages.keys()].join(" ") });
      element.append(s("rect", { class: "box", width: node.w.toFixed(1), height: node.h.toFixed(1), rx: 6 }));
      const shares = [...node.stages].sort((a, b) => a[0] - b[0]), timed = shares.some(([, [, t]]) => t > 0);
      const total = shares.reduce((sum, [, [n, t]]) => sum + (timed ? t : n), 0) || 1;
      let at = 0;
      for (const [stage, [n, t]] of shares) {
        const part = (timed ? t : n) / total, colour = pp.stageColour(stage);
        if (open) {
          element.append(s("rect", { class: "stripe", x: at * node.w, y: 0, width: Math.max(1, part * node.w), height: 4, colour }));
        } else {
          element.append(s("rect", { class: "tint", x: 1, y: at * node.h, width: Math.max(0, node.w - 2), height: part * node.h, colour }),
            s("rect", { class: "stripe", x: 0, y: at * node.h, width: 5, height: Math.max(1, part * node.h), colour }));
        }
        at += part;
      }
      const name = pp.shorten(node.label, open ? 40 : 34), sub = this.subtitle(node);
      if (open) {
        element.append(s("text", { class: "name", x: 12, y: 17 }, name), s("text", { class: "sub", x: 20 + textWidth(name, 12), y: 17 }, sub));
      } else {
        element.append(s("text", { class: "name", x: 12, y: 18 }, name), s("text", { class: "sub", x: 12, y: 33 }, sub));
      }
      if (group) {
        const x = node.w - 16, middle = open ? HEAD / 2 : node.h / 2;
        element.append(s("g", { class: "opener", "data-opener": node.id, onclick: (event) => { event.stopPropagation(); if (!this.dragged) this.toggle(node); } },
          s("rect", { class: "toggle-box", x: x - 15, y: middle - 15, width: 30, height: 30 }), s("text", { class: "toggle", x, y: middle + 5 }, open ? "−" : "+")));
      }
      element.append(s("title", {}, node.path ? `${node.path}${node.op >= 0 ? ` (${this.graph.name(node.op)})` : ""}` : node.label));
      element.addEventListener("click", (event) => { event.stopPropagation(); if (!this.dragged) this.select(node); });
      element.addEventListener("dblclick", (event) => { event.stopPropagation(); event.preventDefault(); if (group) this.toggle(node); });
      this.elements.set(node, element);
      return element;
    }

    edge(node, { edge, route, dx, dy }) {
      const X = node.X + dx, Y = node.Y + dy, inside = node === this.tree.root ? [0, 0] : [node.X, node.Y];
      let d, label;
      const inY = inside[1] + HEAD, outY = inside[1] + node.h;
      if (route) {
        const from = edge.from === "in" ? [X + route.from[0], inY] : [edge.from.X + (edge.from.open ? edge.from.outX : edge.from.w / 2), edge.from.Y + edge.from.h];
        const to = edge.to === "out" ? [X + route.to[0], outY] : [edge.to.X + (edge.to.open ? edge.to.inX : edge.to.w / 2), edge.to.Y];
        let [x, y] = from;
        d = `M${x.toFixed(1)} ${y.toFixed(1)}`;
        const clear = Y + route.clear;
        if (clear > y + 1) { d += `V${clear.toFixed(1)}`; y = clear; }
        const bend = (tx, ty) => { const m = (ty - y) / 2; d += `C${x.toFixed(1)} ${(y + m).toFixed(1)} ${tx.toFixed(1)} ${(ty - m).toFixed(1)} ${tx.toFixed(1)} ${ty.toFixed(1)}`; x = tx; y = ty; };
        for (const [px, top, bottom] of route.points) { bend(X + px, Y + top); if (bottom > top) { d += `V${(Y + bottom).toFixed(1)}`; y = Y + bottom; } }
        label = [(x + to[0]) / 2, (y + to[1]) / 2];
        bend(to[0], to[1]);
      } else {
        const a = edge.from === "in" ? node : edge.from, b = edge.to === "out" ? node : edge.to;
        const x1 = a.X + a.w, y1 = a.Y + a.h / 2, x2 = b.X + b.w, y2 = b.Y + b.h / 2, far = Math.max(x1, x2) + 30;
        d = `M${x1} ${y1}C${far} ${y1} ${far} ${y2} ${x2} ${y2}`;
        label = [far - 8, (y1 + y2) / 2];
      }
      const inner = edge.from === "in" ? "into" : edge.to === "out" ? "out" : "edge";
      const path = s("path", { class: `edge${edge.cut ? " cut" : ""}${edge.skip ? " skip" : ""}`, d, "data-edge": inner, "marker-end": edge.to === "out" ? null : "url(#head)" });
      edge.path = path;
      const hit = s("path", { d, fill: "none", stroke: "transparent", "stroke-width": 10, onclick: (event) => { event.stopPropagation(); if (!this.dragged) this.explainEdge(edge); } });
      if (edge.label && edge.cut && edge.bytes) {
        this.tags.push({ edge, text: pp.bytes(edge.bytes), x: label[0], y: label[1] });
      }
      return s("g", {}, path, hit);
    }

    /** Byte counts on the edges that cross a cut, moved aside where they would cover each other. */
    placeTags() {
      const placed = [];
      for (const tag of this.tags.sort((a, b) => a.y - b.y || a.x - b.x)) {
        const width = textWidth(tag.text, 10.5) + 12;
        const free = (x) => placed.every((p) => Math.abs(p.x - x) > (p.width + width) / 2 + 2 || Math.abs(p.y - tag.y) > 18);
        let step = 0, x = tag.x;
        while (!free(x)) { step++; x = tag.x + (step % 2 ? 1 : -1) * Math.ceil(step / 2) * 8; }
        placed.push({ x, y: tag.y, width });
        this.labels.append(s("g", { class: "bytes", "data-bytes": tag.edge.bytes, onclick: () => this.explainEdge(tag.edge) },
          s("rect", { x: x - width / 2, y: tag.y - 8, width, height: 16, rx: 8 }), s("text", { x, y: tag.y + 3.8 }, tag.text)));
      }
    }

    tiedLines() {
      const group = s("g", {}), shown = pp.representatives(this.tree, this.graph.count);
      const right = this.tree.root.w;
      this.graph.tied.forEach(([name, ops], n) => {
        const nodes = [...new Set(ops.map((op) => shown[op]))];
        for (let i = 1; i < nodes.length; i++) {
          const a = nodes[0], b = nodes[i], far = right + 14 + 12 * (n % 4), ya = a.Y + a.h - 7, yb = b.Y + b.h - 7;
          const path = s("path", { class: "edge tied", "data-tied": name, d: `M${a.X + a.w} ${ya}H${far - 10}Q${far} ${ya} ${far} ${ya + 10 * Math.sign(yb - ya)}V${yb - 10 * Math.sign(yb - ya)}Q${far} ${yb} ${far - 10} ${yb}H${b.X + b.w}` });
          path.append(s("title", {}, `tied weight ${name}`));
          group.append(path);
        }
      });
      return group;
    }

    // ---- moving and zooming

    apply() {
      const { x, y, k } = this.view;
      this.world.setAttribute("transform", `translate(${x.toFixed(2)} ${y.toFixed(2)}) scale(${k.toFixed(4)})`);
      this.svg.dataset.zoom = k;
    }
    size() { return [this.frame.clientWidth || 700, this.frame.clientHeight || 500]; }
    /** The top of the graph at a size that can be read. */
    home() {
      const [w, t] = this.size(), root = this.tree.root;
      this.svg.setAttribute("width", w);
      this.svg.setAttribute("height", t);
      const k = Math.min(1, Math.max(0.55, (w - 20) / (root.w + 60)));
      this.view = { k, x: (w - root.w * k) / 2, y: 6 };
      if (root.w * k > w) {
        let first = root;
        while (first.open && first.children.length) first = first.children[0];
        this.view.x = w / 2 - (first.X + first.w / 2) * k;
      }
      this.apply();
    }
    fit() {
      const [w, t] = this.size(), root = this.tree.root;
      const k = Math.min(1.4, (w - 16) / (root.w + 60), (t - 16) / root.h);
      this.view = { k, x: (w - root.w * k) / 2, y: (t - root.h * k) / 2 };
      this.touched = true;
      this.apply();
    }
    zoom(factor, at) {
      const [w, t] = this.size(), [cx, cy] = at || [w / 2, t / 2], k = Math.min(4, Math.max(0.02, this.view.k * factor)), f = k / this.view.k;
      this.view = { k, x: cx - (cx - this.view.x) * f, y: cy - (cy - this.view.y) * f };
      this.touched = true;
      this.apply();
    }
    center(node) {
      const [w, t] = this.size(), k = Math.max(0.7, Math.min(1.2, this.view.k));
      const tall = Math.min(node.h, t / k - 40);
      this.view = { k, x: w / 2 - (node.X + Math.min(node.w, w / k - 20) / 2) * k, y: t / 2 - (node.Y + tall / 2) * k };
      this.touched = true;
      this.apply();
    }
    listen() {
      const pointers = new Map(), svg = this.svg;
      const local = (event) => { const box = svg.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
      svg.addEventListener("wheel", (event) => {
        if (!event.ctrlKey && !event.metaKey && !this.focused) return;
        event.preventDefault();
        this.zoom(Math.exp(-event.deltaY / 300), local(event));
      }, { passive: false });
      svg.addEventListener("focus", () => { this.focused = true; });
      svg.addEventListener("blur", () => { this.focused = false; });
      svg.addEventListener("pointerdown", (event) => { pointers.set(event.pointerId, local(event)); this.dragged = false; this.travel = 0; });
      addEventListener("pointermove", (event) => {
        if (!pointers.has(event.pointerId)) return;
        const before = pointers.get(event.pointerId), now = local(event);
        if (pointers.size === 2) {
          const other = [...pointers].find(([id]) => id !== event.pointerId)[1];
          const was = Math.hypot(before[0] - other[0], before[1] - other[1]), is = Math.hypot(now[0] - other[0], now[1] - other[1]);
          if (was > 4) this.zoom(is / was, [(now[0] + other[0]) / 2, (now[1] + other[1]) / 2]);
        } else {
          this.travel += Math.hypot(now[0] - before[0], now[1] - before[1]);
          if (this.travel > 5) {
            this.dragged = true;
            this.touched = true;
            this.view.x += now[0] - before[0];
            this.view.y += now[1] - before[1];
            this.apply();
          }
        }
        pointers.set(event.pointerId, now);
      });
      const release = (event) => pointers.delete(event.pointerId);
      addEventListener("pointerup", release);
      addEventListener("pointercancel", release);
      svg.addEventListener("keydown", (event) => {
        const keys = { "+": () => this.zoom(1.3), "=": () => this.zoom(1.3), "-": () => this.zoom(1 / 1.3), 0: () => this.fit(),
          ArrowUp: () => { this.view.y += 60; this.apply(); }, ArrowDown: () => { this.view.y -= 60; this.apply(); }, ArrowLeft: () => { this.view.x += 60; this.apply(); }, ArrowRight: () => { this.view.x -= 60; this.apply(); } };
        if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
      });
    }

    // ---- opening and closing

    visibleCount() {
      let n = 0;
      (function walk(node) { for (const child of node.children) { n++; if (child.open) walk(child); } })(this.tree.root);
      return n;
    }
    toggle(node) {
      const before = [node.X * this.view.k + this.view.x, node.Y * this.view.k + this.view.y];
      node.open = !node.open;
      if (node.open && this.visibleCount() > MOST) {
        node.open = false;
        this.status.textContent = `more than ${MOST} boxes: close some first`;
        return;
      }
      this.render();
      this.view.x = before[0] - node.X * this.view.k;
      this.view.y = before[1] - node.Y * this.view.k;
      this.touched = true;
      this.apply();
      this.select(node);
    }
    openLevel() {
      const closed = [];
      (function walk(node) { for (const child of node.children) { if (child.open) walk(child); else if (child.children.length) closed.push(child); } })(this.tree.root);
      const depth = Math.min(...closed.map((n) => n.depth));
      let seen = this.visibleCount();
      for (const node of closed) {
        if (node.depth !== depth || seen + node.children.length > MOST) continue;
        node.open = true;
        seen += node.children.length;
      }
      this.render();
      this.home();
    }
    closeAll() {
      (function walk(node) { for (const child of node.children) { child.open = false; walk(child); } })(this.tree.root);
      this.render();
      this.home();
    }
  }
  pp.GraphView = GraphView;

  pp.renderGraph = function (root, data) {
    pp.graphView = new GraphView(root, data);
    pp.showChunk = (chunk) => {
      const view = pp.graphView;
      view.usePlan("A");
      view.use("stage");
      const node = view.tree.root.children.find((n) => n.chunk === chunk);
      if (node) { view.center(node); view.select(node); }
      root.scrollIntoView({ behavior: "auto", block: "start" });
    };
  };
})((globalThis.pipepart = globalThis.pipepart || {}));
