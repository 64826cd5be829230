// What if: another schedule, number of micro-batches, slack, other links. Simulated here, in the page.
(function (pp) {
  "use strict";
  const { h } = pp;

  /** The plan's costs under other conditions. Times are proportional to the size of a micro-batch. */
  pp.scaledCosts = function (plan, { microbatches, keepBatch, link, compute }) {
    const size = keepBatch ? plan.microbatches / microbatches : 1;
    const times = (values) => values.map((v) => v * size * compute);
    const sends = (list) => list.map(([a, b, v]) => [a, b, v * size * link]);
    const c = plan.costs;
    return pp.fillCosts({
      forward: times(c.forward), backward_input: times(c.backward_input), backward_weight: times(c.backward_weight),
      backward: times(c.backward), recompute: times(c.recompute), activation: c.activation.map((v) => v * size),
      kept_for_weight: c.kept_for_weight, send_forward: sends(c.send_forward), send_backward: sends(c.send_backward),
      handling_forward: c.handling_forward.slice(), handling_backward: c.handling_backward.slice(),
      contention: c.contention, reduce: c.reduce.slice(), reduce_tied: c.reduce_tied.slice(),
    });
  };

  /** The plan's own order of actions, taken from its timeline, for schedules without a rule (from a file). */
  pp.ownSchedule = function (plan, { stages, microbatches }) {
    if (stages !== plan.stages || microbatches !== plan.microbatches)
      throw new Error(`the plan's own order is for ${plan.stages} stages and ${plan.microbatches} micro-batches`);
    const actions = pp.unpackTimeline(plan.timeline).compute;
    return { name: plan.schedule, stages, microbatches, placement: plan.placement, actions };
  };

  /** Simulate a plan's chunks with another schedule. Throws an error with a sentence for the user if it is impossible. */
  pp.whatIf = function (plan, choice) {
    const chunks = plan.placement.length;
    if (chunks % choice.stages) throw new Error(`${chunks} chunks cannot be shared equally by ${choice.stages} stages`);
    const costs = pp.scaledCosts(plan, choice);
    const schedule = choice.schedule === "as planned" ? pp.ownSchedule(plan, choice) : pp.makeSchedule(choice.schedule, {
      stages: choice.stages, microbatches: choice.microbatches, chunks: chunks / choice.stages, slack: choice.slack, costs,
    });
    const timeline = pp.simulate(schedule, costs, plan.edges);
    const size = choice.keepBatch ? (plan.microbatch_size * plan.microbatches) / choice.microbatches : plan.microbatch_size;
    timeline.throughput = (size * choice.microbatches * plan.replicas) / timeline.stepTime;
    return timeline;
  };

  pp.renderWhatIf = function (root, data) {
    const { plan } = data, chunks = plan.placement.length;
    const ruled = Boolean(pp.SCHEDULE_KINDS[plan.schedule]);
    const state = { schedule: ruled ? plan.schedule : "as planned", stages: plan.stages, microbatches: plan.microbatches, slack: plan.slack, keepBatch: false, link: 1, compute: 1 };
    const divisors = Array.from({ length: chunks }, (_, n) => n + 1).filter((n) => chunks % n === 0);
    const choose = (name, options, id) => {
      const select = h("select", { id, onchange: () => { state[name] = isNaN(select.value) ? select.value : Number(select.value); update(); } },
        options.map(([value, text]) => h("option", { value }, text)));
      select.value = String(state[name]);
      return select;
    };
    const number = (name, least, most, id) => {
      const input = h("input", { type: "number", min: least, max: most, step: 1, id, oninput: () => {
        const value = Math.round(Number(input.value));
        if (value >= least && value <= most) { state[name] = value; update(); }
      } });
      input.value = state[name];
      return input;
    };
    const factors = [["0", "free"], ["0.25", "4 x faster"], ["0.5", "2 x faster"], ["1", "as planned"], ["2", "2 x slower"], ["4", "4 x slower"], ["10", "10 x slower"]];
    const names = Object.keys(data.schedules).filter((n) => n !== "forward" && pp.SCHEDULE_KINDS[n]);
    if (!ruled) names.unshift("as planned");
    const schedules = h("select", { id: "whatif-schedule", onchange: () => { state.schedule = schedules.value; update(); } },
      names.map((n) => h("option", { value: n }, n)));
    schedules.value = state.schedule;
    const micro = number("microbatches", 1, 4096, "whatif-microbatches"), slack = number("slack", 0, 64, "whatif-slack");
    const result = h("div", { class: "kpis", id: "whatif-result" }), error = h("p", { class: "note", id: "whatif-error", role: "status" });
    const holder = h("div", {}), sweep = h("div", { class: "scroll" });
    let gantt = null, pending = 0;

    const kpi = (name, value, note, id) => h("div", { class: "kpi", id }, h("span", {}, name), h("b", {}, value), h("span", {}, note));
    const against = (value, base) => {
      const change = value / base - 1;
      return Math.abs(change) < 5e-5 ? "the same as the plan" : `${change > 0 ? "+" : ""}${(100 * change).toFixed(1)} % against the plan`;
    };

    function update() {
      let timeline;
      try {
        timeline = pp.whatIf(plan, state);
      } catch (problem) {
        error.textContent = `Not possible: ${problem.message}.`;
        result.replaceChildren();
        holder.hidden = true;
        return;
      }
      holder.hidden = false;
      const kind = pp.SCHEDULE_KINDS[state.schedule];
      error.textContent = !kind || kind.slack || !state.slack ? "" : `${state.schedule} takes no slack: it is left out.`;
      const peaks = pp.peaks(timeline), most = Math.max(...peaks), base = Math.max(...plan.memory.map((m) => m.activations));
      const weighs = plan.costs.activation.some((v) => v > 0);
      result.replaceChildren(
        kpi("Step", pp.seconds(timeline.stepTime), against(timeline.stepTime, plan.step_time), "whatif-step"),
        kpi("Throughput", `${pp.count(timeline.throughput)} /s`, against(timeline.throughput, plan.throughput), "whatif-throughput"),
        kpi("Bubble", pp.percent(timeline.bubble), `plan ${pp.percent(plan.bubble)}`, "whatif-bubble"),
        kpi("Live activations, fullest stage", weighs ? pp.bytes(most) : "-", weighs && base ? against(most, base) : "", "whatif-peak"));
      root.dataset.step = timeline.stepTime;
      const shown = [{ label: "what if", timeline }];
      if (gantt) gantt.setTimelines(shown);
      else gantt = new pp.Gantt(holder, shown, { memory: timeline.stages <= 4, id: "whatif-gantt" });
      clearTimeout(pending);
      pending = setTimeout(table, 120);
    }

    function table() {
      const counts = [...new Set([1, 2, 4, 8, 16].map((n) => n * state.stages).concat(plan.microbatches, state.microbatches))]
        .filter((m) => m * chunks <= 8192).sort((a, b) => a - b);
      const possible = names.filter((n) => {
        if (n === "as planned") return false;
        try { pp.makeSchedule(n, { stages: state.stages, microbatches: 1, chunks: chunks / state.stages }); return true; } catch { return false; }
      });
      let best = 0;
      const cells = possible.map((name) => counts.map((microbatches) => {
        const rate = pp.whatIf(plan, { ...state, schedule: name, microbatches }).throughput;
        best = Math.max(best, rate);
        return rate;
      }));
      sweep.replaceChildren(h("table", { id: "whatif-table" },
        h("thead", {}, h("tr", {}, h("th", {}, "samples/s by micro-batches"), counts.map((m) => h("th", {}, m)))),
        h("tbody", {}, possible.map((name, row) => h("tr", {}, h("td", {}, name), counts.map((m, column) => {
          const rate = cells[row][column], chosen = name === state.schedule && m === state.microbatches;
          return h("td", { class: `${chosen ? "chosen" : ""} ${rate >= best * 0.99999 ? "better" : ""}` }, pp.button(pp.count(rate), () => {
            state.schedule = schedules.value = name;
            state.microbatches = m;
            micro.value = m;
            update();
          }, { "data-schedule": name, "data-microbatches": m }));
        }))))));
    }

    root.append(h("h2", {}, "What if"),
      h("p", { class: "note" }, "The same chunks under other conditions, simulated in this page. If the batch size is kept, times and bytes of a micro-batch are proportional to its samples."),
      h("div", { class: "tools" },
        h("label", {}, "schedule", schedules), h("label", {}, "micro-batches", micro), h("label", {}, "slack", slack),
        divisors.length > 1 ? h("label", {}, "stages", choose("stages", divisors.map((n) => [n, `${n} (${pp.plural(chunks / n, "chunk")} each)`]), "whatif-stages")) : null,
        h("label", {}, "links", choose("link", factors, "whatif-link")), h("label", {}, "compute", choose("compute", factors.slice(1), "whatif-compute")),
        pp.check("keep the batch size", state.keepBatch, (on) => { state.keepBatch = on; update(); }, "whatif-keep")),
      error, result, holder, h("h3", {}, "All schedules of these chunks"), sweep);
    const start = new IntersectionObserver((entries) => {
      if (entries.some((entry) => entry.isIntersecting)) { start.disconnect(); update(); }
    }, { rootMargin: "300px" });
    start.observe(root);
    pp.openWhatIf = () => { start.disconnect(); update(); };
  };
})((globalThis.pipepart = globalThis.pipepart || {}));
