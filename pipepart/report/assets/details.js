// The graph view, continued: search, selection, and the details of a box or an edge.
(function (pp) {
  "use strict";
  if (typeof document === "undefined") return;
  const { h } = pp;

  Object.assign(pp.GraphView.prototype, {
    // ---- search

    find(text) {
      const wanted = text.trim().toLowerCase();
      this.hits = new Set();
      this.hitNodes = [];
      if (wanted) {
        const g = this.graph;
        for (let op = 0; op < g.count; op++) {
          if (`${g.module(op)}\n${g.name(op)}\n${g.moduleClass(op)}\n${g.target(op)}`.toLowerCase().includes(wanted)) {
            this.hits.add(op);
            this.hitNodes.push(this.tree.leaf[op]);
          }
        }
      }
      this.at = -1;
      this.markHits();
      const chips = this.hitNodes.slice(0, 12).map((node) => pp.button(node.path || node.label, () => this.reveal(node), { class: "chip", "data-hit": node.op }));
      if (wanted) chips.unshift(h("span", { class: "soft" }, `${pp.plural(this.hits.size, "op")} found`));
      this.found.replaceChildren(...chips);
    },
    nextHit() {
      if (!this.hitNodes || !this.hitNodes.length) return;
      this.at = (this.at + 1) % this.hitNodes.length;
      this.reveal(this.hitNodes[this.at]);
    },
    markHits() {
      const shown = new Set();
      if (this.hits.size) {
        const stands = pp.representatives(this.tree, this.graph.count);
        for (const op of this.hits) shown.add(stands[op]);
      }
      for (const [node, element] of this.elements) element.classList.toggle("hit", shown.has(node));
    },
    reveal(node) {
      for (let at = node.parent; at; at = at.parent) at.open = true;
      this.render();
      this.center(node);
      this.select(node);
    },

    // ---- details

    select(node) {
      const old = this.selected && this.elements.get(this.selected);
      if (old) old.classList.remove("selected");
      this.selected = node;
      const now = this.elements.get(node);
      if (now) now.classList.add("selected");
      this.explain(node);
    },

    opLink(op) {
      const node = this.tree.leaf[op];
      return h("li", {}, pp.button(this.graph.module(op) || this.graph.name(op), () => this.reveal(node), { class: "link" }));
    },

    explain(node) {
      const g = this.graph, plan = this.plan, rows = [], extra = [];
      const row = (name, value) => { if (value !== "" && value !== null && value !== undefined) rows.push(h("dt", {}, name), h("dd", {}, value)); };
      const held = [...node.parameters.values()], bytes = held.reduce((sum, p) => sum + p.bytes, 0);
      const names = new Set(held.flatMap((p) => p.names));
      if (node.op >= 0) {
        const op = node.op, chunk = plan.chunk_of[op];
        row("op", g.name(op));
        row("module", g.module(op));
        row("class", g.moduleClass(op));
        row("target", g.target(op));
        row("kind", g.kind(op));
        row("stage", `${plan.placement[chunk]}${plan.chunks_per_stage > 1 ? `, chunk ${chunk}` : ""}`);
        row("shape", g.shape(op));
        row("dtype", g.dtype(op));
        row("output", g.outputBytes(op) ? pp.bytes(g.outputBytes(op)) : "");
        row("source", g.source(op));
        const list = (title, ops) => { if (ops.length) extra.push(h("h3", {}, title), h("ul", {}, ops.slice(0, 12).map((o) => this.opLink(o))), ops.length > 12 ? h("p", { class: "soft" }, `and ${ops.length - 12} more`) : null); };
        list("takes from", g.into[op]);
        list("gives to", g.out[op]);
      } else {
        row(node.chunk === undefined ? "module" : "chunk", node.chunk === undefined ? node.path || node.label : String(node.chunk));
        row("ops", String(node.sum.ops));
        row("stages", [...node.stages].sort((a, b) => a[0] - b[0]).map(([stage, [n]]) => `${stage} (${pp.plural(n, "op")})`).join(", "));
      }
      if (node.sum.forward || node.sum.backward) {
        row("forward", pp.seconds(node.sum.forward));
        row("backward", pp.seconds(node.sum.backward));
      }
      row("FLOPs", node.sum.flops ? pp.count(node.sum.flops) : "");
      row("saved", node.sum.saved ? `${pp.bytes(node.sum.saved)} per micro-batch` : "");
      row("weights", bytes ? `${pp.bytes(bytes)} in ${pp.plural(names.size, "tensor")}` : "");
      const tied = g.tied.filter(([name]) => names.has(name));
      for (const [name, ops] of tied.slice(0, 4)) extra.push(h("h3", {}, `tied weight ${name}`), h("ul", {}, ops.slice(0, 8).map((o) => this.opLink(o))));
      this.details.replaceChildren(h("h3", {}, node.label), h("dl", {}, rows), ...extra.filter(Boolean));
      this.details.dataset.shown = node.label;
    },

    explainEdge(edge) {
      for (const path of this.world.querySelectorAll(".edge.selected")) path.classList.remove("selected");
      if (edge.path) edge.path.classList.add("selected");
      const end = (node) => (typeof node === "string" ? edge.container.label : node.label);
      const producers = [...edge.producers].sort((a, b) => this.graph.outputBytes(b) - this.graph.outputBytes(a));
      this.details.replaceChildren(h("h3", {}, `${end(edge.from)} → ${end(edge.to)}`), h("dl", {},
        h("dt", {}, "tensors"), h("dd", {}, String(producers.length || "unknown")),
        edge.cut ? [h("dt", {}, "over the cut"), h("dd", {}, `${pp.bytes(edge.bytes)} per micro-batch`)] : null,
        edge.skip ? [h("dt", {}, "skip"), h("dd", {}, "passes over at least one chunk, sent directly")] : null),
      h("ul", {}, producers.slice(0, 20).map((op) => { const item = this.opLink(op); item.append(` ${this.graph.outputBytes(op) ? pp.bytes(this.graph.outputBytes(op)) : ""} ${this.graph.shape(op)}`); return item; })));
      this.details.dataset.shown = "edge";
    },
  });
})((globalThis.pipepart = globalThis.pipepart || {}));
