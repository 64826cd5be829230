// The figures at the top, the chunks in a row, and two plans side by side.
(function (pp) {
  "use strict";
  const { h } = pp;

  const kpi = (name, value, note, id) => h("div", { class: "kpi", id }, h("span", {}, name), h("b", {}, value), h("span", {}, note));

  function figures(data) {
    const { plan } = data, found = [];
    found.push(kpi("Step, predicted", pp.seconds(plan.predicted),
      plan.rehearsed ? `rehearsed; ${pp.seconds(plan.step_time)} by the costs of its ops` : `costs: ${plan.cost_source}`, "kpi-step"));
    if (data.measured_step) {
      const error = plan.predicted / data.measured_step - 1;
      const word = Math.abs(error) < 5e-4 ? "as predicted" : `prediction ${pp.percent(Math.abs(error))} too ${error < 0 ? "low" : "high"}`;
      found.push(kpi("Step, measured", pp.seconds(data.measured_step), word, "kpi-measured"));
    }
    const beaten = [data.measured_step, plan.rehearsed].some((step) => step && step < plan.lower_bound);
    found.push(kpi("Lower bound", pp.seconds(plan.lower_bound),
      beaten ? "the costs of the ops are too high: a real step was faster" : "no split, no schedule is faster", "kpi-bound"));
    found.push(kpi("Gap to the bound", pp.percent(plan.gap),
      plan.proved ? "slowest stage optimal (proved)" : `slowest stage within ${pp.percent(plan.bottleneck_gap)} of optimal`, "kpi-gap"));
    const measuredBubble = data.measured ? pp.unpackTimeline(data.measured).bubble : null;
    found.push(kpi("Bubble", pp.percent(plan.bubble),
      measuredBubble === null ? "device time without work" : `measured ${pp.percent(measuredBubble)}`, "kpi-bubble"));
    const samples = plan.microbatches * plan.microbatch_size * plan.replicas;
    const rate = data.measured_step ? samples / data.measured_step : plan.throughput;
    found.push(kpi("Throughput", `${pp.count(rate)} /s`,
      `${data.measured_step ? "measured" : "predicted"}, samples; ${pp.plural(plan.replicas, "replica")}`, "kpi-throughput"));
    const peak = Math.max(...plan.memory.map((m) => m.weights + m.gradients + m.optimizer + m.activations + m.scratch));
    found.push(kpi("Memory of the fullest stage", pp.bytes(peak), "weights, gradients, optimizer, activations, scratch", "kpi-memory"));
    return h("div", { class: "kpis" }, found);
  }

  /** Where the time of a measured step went: a bar for each part, the other ways to train, and the advice. */
  function account(found) {
    if (!found) return null;
    const most = Math.max(...found.parts.map((part) => part.seconds));
    const rows = found.parts.map((part) => [
      h("span", { class: "label", title: part.meaning }, part.name),
      h("div", { class: "bar", title: part.meaning }, h("i", { colour: `var(--${part.name === "compute" ? "F" : "RECV"})`, "width%": most ? 100 * part.seconds / most : 0 })),
      h("span", { class: "figure" }, `${pp.seconds(part.seconds)} · ${pp.percent(found.step ? part.seconds / found.step : 0)}`),
    ]);
    const others = found.alternatives.map((other) => h("li", {},
      `${other.name}: about ${pp.seconds(other.seconds)} a step` + `, ${pp.seconds(other.exchange)} of it exchange${other.assumed ? " over an assumed link" : ""}` +
      (other.memory === null ? "" : `, ${pp.bytes(other.memory)} on each device`) + (other.fits === false ? ", more than a device has" : "")));
    return h("div", { id: "account" }, h("h3", {}, "Where the time of a step goes"),
      h("p", { class: "note" }, `The mean of ${pp.plural(found.steps, "usual step")} over all devices: ${pp.seconds(found.step)}, with all that the trainer does between two batches.`),
      h("div", { class: "bars" }, rows), h("p", { id: "advice" }, found.advice),
      others.length ? h("ul", { class: "note" }, others) : null);
  }

  function strip(plan) {
    const found = [];
    const direct = new Map(plan.traffic.map((t) => [t.source * 65536 + t.target, t]));
    plan.chunks.forEach((chunk, c) => {
      if (c > 0) {
        const t = direct.get((c - 1) * 65536 + c);
        found.push(h("div", { class: "hop", "data-cut": c },
          h("span", {}, t ? pp.bytes(t.forward_bytes) : "nothing"), h("i", {}),
          h("span", {}, t && t.backward_bytes ? `back ${pp.bytes(t.backward_bytes)}` : "no gradient")));
      }
      found.push(h("button", {
        class: "chunk", type: "button", "data-chunk": c, "data-stage": chunk.stage, colour: pp.stageColour(chunk.stage),
        onclick: () => pp.showChunk && pp.showChunk(c),
      },
        h("b", {}, `stage ${chunk.stage}${plan.chunks_per_stage > 1 ? ` · chunk ${c}` : ""}`),
        h("span", { class: "path" }, chunk.first === chunk.last ? chunk.first : `${chunk.first} … ${chunk.last}`),
        h("span", {}, `${pp.plural(chunk.ops, "op")}, ${pp.count(chunk.parameters)} params${plan.recompute[c] ? ", recomputed" : ""}`),
        h("span", { class: "path" }, `F ${pp.seconds(chunk.forward)}, B ${pp.seconds(chunk.backward_input + chunk.backward_weight)}`)));
    });
    const skips = plan.traffic.filter((t) => t.target > t.source + 1);
    const chips = skips.map((t) => h("span", { class: "chip skip", "data-skip": `${t.source}-${t.target}` },
      `skip ${t.source} → ${t.target}: ${pp.bytes(t.forward_bytes)}`));
    return [h("div", { class: "strip" }, found), chips.length ? h("div", { class: "chips" }, chips) : null];
  }

  pp.renderOverview = function (root, data) {
    const { plan } = data;
    root.append(h("h2", {}, "Overview"), figures(data),
      h("p", { class: "note" },
        `${plan.schedule}${plan.slack ? ` with slack ${plan.slack}` : ""}, ${pp.plural(plan.microbatches, "micro-batch")} of ${plan.microbatch_size}; ` +
        `${pp.plural(plan.stages, "stage")} x ${pp.plural(plan.chunks_per_stage, "chunk")}; split: ${plan.method}${plan.cluster ? `; cluster: ${plan.cluster}` : ""}. ` +
        "The chunks of the model, and the bytes that one micro-batch sends over each cut:"),
      ...strip(plan).filter(Boolean));
    if (data.graph.tied.length) {
      root.append(h("div", { class: "chips" }, data.graph.tied.map(([name, ops]) =>
        h("span", { class: "chip" }, `tied weight ${name}: ${pp.plural(ops.length, "use")}`))));
    }
    const spent = account(data.account);
    if (spent) root.append(spent);
    const tried = pp.triedTable(plan);
    if (tried) root.append(tried);
    if (plan.baselines.length) {
      root.append(h("p", { class: "note" }, "Throughput against simpler splits with the same schedule: " +
        plan.baselines.map(([name, seconds]) => `${(seconds / plan.step_time).toFixed(2)} x ${name}`).join(", ") + "."));
    }
  };

  /** The other plans that were tried, with the difference of their steps. */
  pp.triedTable = function (plan) {
    if (!plan.tried.length) return null;
    const rows = plan.tried.slice().sort((a, b) => a[1] - b[1]).slice(0, 30);
    return h("details", { id: "tried" }, h("summary", {}, `Other plans that were tried: ${plan.tried.length}`),
      h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["plan", "step", "against this one"].map((t) => h("th", {}, t)))),
        h("tbody", {}, rows.map(([name, seconds]) => h("tr", {}, h("td", {}, name), h("td", {}, pp.seconds(seconds)),
          h("td", {}, `${seconds >= plan.step_time ? "+" : ""}${(100 * (seconds / plan.step_time - 1)).toFixed(1)} %`)))))));
  };

  pp.renderCompare = function (root, data) {
    const a = data.plan, b = data.compare;
    if (!b) return;
    root.hidden = false;
    const peak = (plan) => Math.max(...plan.memory.map((m) => m.weights + m.gradients + m.optimizer + m.activations + m.scratch));
    const sent = (plan) => plan.traffic.reduce((sum, t) => sum + t.forward_bytes + t.backward_bytes, 0);
    const slowest = (plan) => Math.max(...pp.unpackTimeline(plan.timeline).busy);
    const rows = [
      ["step", a.predicted, b.predicted, pp.seconds, -1],
      ["throughput (samples/s)", a.throughput, b.throughput, pp.count, 1],
      ["bubble", a.bubble, b.bubble, pp.percent, -1],
      ["lower bound", a.lower_bound, b.lower_bound, pp.seconds, 0],
      ["gap to the bound", a.gap, b.gap, pp.percent, 0],
      ["busiest stage", slowest(a), slowest(b), pp.seconds, -1],
      ["memory of the fullest stage", peak(a), peak(b), pp.bytes, -1],
      ["sent per micro-batch", sent(a), sent(b), pp.bytes, -1],
    ];
    const text = (plan) => [["schedule", plan.schedule], ["micro-batches", `${plan.microbatches} x ${plan.microbatch_size}`],
      ["stages x chunks", `${plan.stages} x ${plan.chunks_per_stage}`], ["replicas", plan.replicas], ["slack", plan.slack]];
    const body = text(a).map(([name, value], n) =>
      h("tr", {}, h("td", {}, name), h("td", {}, value), h("td", {}, text(b)[n][1]), h("td", {}, "")));
    for (const [name, x, y, show, sign] of rows) {
      const change = x ? y / x - 1 : null, better = sign && change && Math.abs(change) > 5e-4 ? change * sign > 0 : null;
      body.push(h("tr", {}, h("td", {}, name), h("td", {}, show(x)), h("td", {}, show(y)),
        h("td", { class: better === null ? null : better ? "better" : "worse" },
          change === null ? "" : `${change > 0 ? "+" : ""}${(100 * change).toFixed(1)} %`)));
    }
    root.append(h("h2", {}, "Compare"),
      h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["", `A ${a.hash.slice(0, 8)}`, `B ${b.hash.slice(0, 8)}`, "B against A"].map((t) => h("th", {}, t)))), h("tbody", {}, body))),
      h("h3", {}, "A"), ...strip(a).filter(Boolean), h("h3", {}, "B"), ...strip(b).filter(Boolean));
    if (data.same_ops) {
      const moved = new Map();
      let count = 0;
      a.chunk_of.forEach((chunk, op) => {
        const from = a.placement[chunk], to = b.placement[b.chunk_of[op]];
        if (from === to) return;
        count++;
        moved.set(`stage ${from} → ${to}`, (moved.get(`stage ${from} → ${to}`) || 0) + 1);
      });
      root.append(h("p", { class: "note", id: "moved" }, count
        ? `${pp.plural(count, "op")} of ${a.chunk_of.length} on another stage: ${[...moved].map(([way, n]) => `${way}: ${n}`).join(", ")}.`
        : "Every op is on the same stage in both plans."));
    }
  };
})((globalThis.pipepart = globalThis.pipepart || {}));
