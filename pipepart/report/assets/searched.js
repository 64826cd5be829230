// Zero-bubble schedules that are searched by the times of the chunks, as pipepart.schedule.searched does.
(function (pp) {
  "use strict";
  const NEVER = Infinity, PATIENCE = [0.25, 1], MORE = [0, 1];

  function choose(line, now, weight, policy) {
    const when = (kind) => (line.done[kind] < line.arrived[kind].length ? line.arrived[kind][line.done[kind]] : NEVER);
    const forward = when("F"), backward = when("I"), done = line.done;
    const blocked = line.live + 1 > policy.limit * (1 + 1e-9) || done.F - done.I >= line.ahead;
    const ready = forward <= now && !blocked;
    if (backward <= now && !(ready && policy.inTurn && line.last === "I")) return "I";
    if (ready) return "F";
    const due = blocked ? backward : Math.min(backward, forward);
    return done.W < done.I && (forward <= now || now + policy.patience * weight <= due) ? "W" : "";
  }

  function run(stages, microbatches, costs, policy) {
    const lines = Array.from({ length: stages }, (_, s) => ({
      ahead: policy.depth * (stages - 1 - s) + 1 + policy.more, done: { F: 0, I: 0, W: 0 }, last: "",
      arrived: { F: Array(microbatches).fill(s ? NEVER : 0), I: Array(microbatches).fill(NEVER) },
      live: 0, free: 0, first: 0, order: [],
    }));
    const seconds = {
      F: costs.forward.map((t, c) => costs.handling_forward[c] + t),
      I: costs.backward_input.map((t, c) => costs.handling_backward[c] + t),
      W: costs.backward_weight,
    };
    const links = (list) => new Map(list.map(([a, b, t]) => [`${a}>${b}`, t]));
    const there = links(costs.send_forward), back = links(costs.send_backward), kept = costs.kept_for_weight;
    const wakes = new pp.Heap();
    for (let s = 0; s < stages; s++) wakes.push([0, s]);
    const arrive = (stage, kind, k, when) => { lines[stage].arrived[kind][k] = when; wakes.push([when, stage]); };
    while (wakes.size) {
      const [now, s] = wakes.pop(), line = lines[s];
      const kind = line.free > now ? "" : choose(line, now, seconds.W[s], policy);
      if (!kind) continue;
      const k = line.done[kind]++, end = now + seconds[kind][s];
      if (!line.order.length) line.first = now + costs.handling_forward[s];
      line.order.push({ kind, chunk: s, k });
      line.free = end;
      if (kind !== "W") line.last = kind;
      wakes.push([end, s]);
      if (kind === "F") {
        line.live += 1;
        if (s + 1 < stages) arrive(s + 1, "F", k, end + (there.get(`${s}>${s + 1}`) || 0));
        else arrive(s, "I", k, end);
      } else if (kind === "I") {
        line.live -= 1 - kept;
        if (s) arrive(s - 1, "I", k, end + (back.get(`${s - 1}>${s}`) || 0));
      } else line.live -= kept;
    }
    const most = (of) => lines.reduce((found, line) => Math.max(found, of(line)), 0);
    return { step: most((l) => l.free), period: most((l) => l.free - l.first), orders: lines.map((l) => l.order) };
  }

  /** The order of the shortest step that keeps at most depth x stages activations on each stage. */
  pp.searchedSchedule = function (name, stages, microbatches, costs, depth) {
    if (costs.forward.length !== stages) throw new Error(`${name} needs the costs of ${stages} chunks, one per stage`);
    let best = null;
    for (const inTurn of [true, false]) for (const more of MORE) for (const patience of PATIENCE) {
      const found = run(stages, microbatches, costs, { limit: depth * stages, depth, more, patience, inTurn });
      if (!best || found.step < best.step || (found.step === best.step && found.period < best.period)) best = found;
    }
    return { name, stages, microbatches, placement: pp.loopedPlacement(stages, 1), actions: best.orders };
  };
})((globalThis.pipepart = globalThis.pipepart || {}));
