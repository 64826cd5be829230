// Bars per stage: the time of a step and the memory, by use.
(function (pp) {
  "use strict";
  const { h } = pp;
  const NAMES = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient", communication: "waiting for messages", idle: "idle" };
  const MEMORY = { weights: "weights", gradients: "gradients", optimizer: "optimizer", activations: "activations at their peak", scratch: "scratch" };

  function timeBars(timelines) {
    const longest = Math.max(...timelines.map(({ timeline }) => timeline.stepTime)) || 1;
    const shares = timelines.map(({ timeline }) => pp.stageShares(timeline));
    const rows = [], stages = Math.max(...timelines.map(({ timeline }) => timeline.stages));
    for (let stage = 0; stage < stages; stage++) {
      timelines.forEach(({ label, timeline }, n) => {
        const share = shares[n][stage];
        if (!share) return;
        const text = Object.entries(share).filter(([, v]) => v > 0).map(([k, v]) => `${NAMES[k]} ${pp.seconds(v)} (${pp.percent(v / timeline.stepTime)})`).join("\n");
        const tip = (event) => pp.showTip(`stage ${stage}, ${label}\n${text}`, event.clientX, event.clientY);
        rows.push(
          h("span", { class: "label" }, n === 0 ? [h("span", { class: "dot", colour: pp.stageColour(stage) }), `stage ${stage}`] : null, timelines.length > 1 ? ` ${label}` : null),
          h("div", { class: "bar", "data-stage": stage, "data-of": label, onpointermove: tip, onpointerleave: pp.hideTip },
            Object.entries(share).map(([kind, seconds]) => h("i", {
              "data-kind": kind, class: kind === "idle" ? "idle" : null, colour: `var(--${kind})`, "width%": (100 * seconds) / longest,
            }))),
          h("span", { class: "figure" }, `${pp.percent(timeline.busy[stage] / timeline.stepTime)} busy`));
      });
      if (timelines.length > 1) rows.push(h("span", { class: "gap" }));
    }
    const split = timelines.some(({ timeline }) => timeline.compute.some((mine) => mine.some((e) => e.kind === "I")));
    const whole = timelines.some(({ timeline }) => timeline.compute.some((mine) => mine.some((e) => e.kind === "B")));
    const kinds = ["F", ...(whole ? ["B"] : []), ...(split ? ["I", "W"] : []), "communication", "idle"];
    return [pp.legend(kinds.map((k) => [`var(--${k})`, NAMES[k], k === "idle" ? "hatched" : null])), h("div", { class: "bars" }, rows)];
  }

  function memoryBars(plans) {
    const total = (m) => m.weights + m.gradients + m.optimizer + m.activations + m.scratch;
    const limit = Math.max(0, ...plans.flatMap(({ plan }) => plan.memory.map((m) => m.limit || 0)));
    const most = Math.max(limit, ...plans.flatMap(({ plan }) => plan.memory.map(total))) * 1.02 || 1;
    const rows = [], stages = Math.max(...plans.map(({ plan }) => plan.stages));
    for (let stage = 0; stage < stages; stage++) {
      plans.forEach(({ label, plan }, n) => {
        const memory = plan.memory[stage];
        if (!memory) return;
        const text = Object.keys(MEMORY).map((k) => `${MEMORY[k]} ${pp.bytes(memory[k])}`).join("\n") +
          (memory.limit ? `\nlimit ${pp.bytes(memory.limit)}` : "");
        const tip = (event) => pp.showTip(`stage ${stage}${plans.length > 1 ? `, ${label}` : ""}\n${text}`, event.clientX, event.clientY);
        const over = memory.limit && total(memory) > memory.limit;
        rows.push(
          h("span", { class: "label" }, n === 0 ? [h("span", { class: "dot", colour: pp.stageColour(stage) }), `stage ${stage}`] : null, plans.length > 1 ? ` ${label}` : null),
          h("div", { class: "bar", "data-memory": stage, onpointermove: tip, onpointerleave: pp.hideTip },
            Object.keys(MEMORY).map((k) => h("i", { "data-kind": k, colour: `var(--${k})`, "width%": (100 * memory[k]) / most })),
            memory.limit ? h("u", { "left%": (100 * memory.limit) / most }) : null),
          h("span", { class: "figure" }, memory.limit
            ? `${pp.bytes(total(memory))} of ${pp.bytes(memory.limit)}${over ? ": too much" : ""}` : pp.bytes(total(memory))));
      });
      if (plans.length > 1) rows.push(h("span", { class: "gap" }));
    }
    const items = Object.keys(MEMORY).map((k) => [`var(--${k})`, MEMORY[k]]);
    if (limit) items.push(["var(--warn)", "limit"]);
    return [pp.legend(items), h("div", { class: "bars" }, rows)];
  }

  pp.renderStages = function (root, data, timelines) {
    const plans = [{ label: data.compare ? "A" : "", plan: data.plan }];
    if (data.compare) plans.push({ label: "B", plan: data.compare });
    const states = data.optimizer_states;
    root.append(h("h2", {}, "Stages"),
      h("div", { class: "two" },
        h("div", {}, h("h3", {}, "Time of one step"), timeBars(timelines)),
        h("div", {}, h("h3", {}, "Memory"), memoryBars(plans),
          h("p", { class: "note" }, `${states === null ? "As the plan counts it" : `Optimizer counted as ${states} x weights${states === 2 ? " (Adam)" : ""}`}; activations by the predicted schedule.`))));
  };
})((globalThis.pipepart = globalThis.pipepart || {}));
