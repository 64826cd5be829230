// List scheduling, as pipepart.schedule uses it for zb_v and dualpipe_v with few micro-batches: at each moment every free stage takes the best ready action.
(function (pp) {
  "use strict";
  const NEVER = Infinity;

  pp.listSchedule = function (name, placement, microbatches, costs, limits, policy) {
    const { split = true, forwardFirst = false, deepFirst = true, patience = 1 } = policy || {};
    const chunks = placement.length, stageCount = Math.max(...placement) + 1;
    const edges = pp.chainEdges(chunks);
    const seconds = {
      F: costs.forward,
      B: costs.backward.map((b, c) => b + costs.recompute[c]),
      I: costs.backward_input.map((i, c) => i + costs.recompute[c]),
      W: costs.backward_weight,
    };
    const back = split ? "I" : "B";
    const stages = Array.from({ length: stageCount }, (_, s) => ({
      chunks: placement.map((home, c) => [home, c]).filter(([home]) => home === s).map(([, c]) => c),
      limit: limits[s], live: 0, free: 0, order: [],
    }));
    const ahead = Array.from({ length: chunks }, () => []), behind = Array.from({ length: chunks }, () => []);
    for (const [a, b] of edges.forward) { ahead[a].push(b); behind[b].push(a); }
    const grid = (make) => Array.from({ length: chunks }, (_, c) => Array(microbatches).fill(make(c)));
    const missingF = grid((c) => behind[c].length), missingB = grid((c) => ahead[c].length + 1);
    const readyF = grid(() => 0), readyB = grid(() => 0);
    const next = { F: Array(chunks).fill(0), B: Array(chunks).fill(0), W: Array(chunks).fill(0) };
    const wakes = new pp.Heap();
    for (let s = 0; s < stageCount; s++) wakes.push([0, s]);

    const when = (kind, chunk) => {
      const k = next[kind][chunk];
      if (k >= microbatches) return NEVER;
      if (kind === "F") return missingF[chunk][k] ? NEVER : readyF[chunk][k];
      return missingB[chunk][k] ? NEVER : readyB[chunk][k];
    };
    const fits = (stage, chunk) => {
      let later = 0;
      for (const c of stage.chunks) if (c >= chunk) later += costs.activation[c];
      return stage.live + later <= stage.limit * (1 + 1e-9);
    };
    const choose = (stage, now) => {
      let arrival = NEVER, backward = null, forward = null, blocked = false, oldest = microbatches;
      const reversed = stage.chunks.slice().reverse();
      for (const chunk of reversed) {
        const at = when("B", chunk);
        if (at <= now) {
          if (next.B[chunk] < oldest) { oldest = next.B[chunk]; backward = [back, chunk]; }
        } else arrival = Math.min(arrival, at);
      }
      for (const chunk of deepFirst ? reversed : stage.chunks) {
        const at = when("F", chunk);
        if (at === NEVER) continue;
        if (!fits(stage, chunk)) blocked = blocked || at <= now;
        else if (at <= now) forward = forward || ["F", chunk];
        else arrival = Math.min(arrival, at);
      }
      const choice = forwardFirst ? forward || backward : backward || forward;
      if (choice) return choice;
      let pending = null;
      if (split) {
        for (const c of stage.chunks) {
          if (next.W[c] >= next.B[c]) continue;
          if (pending === null || next.W[c] < next.W[pending] || (next.W[c] === next.W[pending] && c > pending)) pending = c;
        }
      }
      if (pending === null) return null;
      return blocked || now + seconds.W[pending] * patience <= arrival ? ["W", pending] : null;
    };
    const arrive = (missing, ready, chunk, k, at) => {
      missing[chunk][k]--;
      ready[chunk][k] = Math.max(ready[chunk][k], at);
      if (!missing[chunk][k]) wakes.push([ready[chunk][k], placement[chunk]]);
    };
    const commit = (s, [kind, chunk], now) => {
      const stage = stages[s], counter = next[kind === "I" ? "B" : kind], k = counter[chunk]++;
      const end = (stage.free = now + seconds[kind][chunk]), size = costs.activation[chunk];
      stage.order.push({ kind, chunk, k });
      if (kind === "F") {
        stage.live += size;
        arrive(missingB, readyB, chunk, k, end);
        for (const target of ahead[chunk]) arrive(missingF, readyF, target, k, end);
      } else if (kind === "W") {
        stage.live -= size * costs.kept_for_weight;
      } else {
        stage.live -= kind === "I" ? size * (1 - costs.kept_for_weight) : size;
        for (const source of behind[chunk]) arrive(missingB, readyB, source, k, end);
      }
      wakes.push([end, s]);
    };
    let left = chunks * microbatches * (split ? 3 : 2);
    while (wakes.size) {
      const [now, s] = wakes.pop();
      while (wakes.size && wakes.top[0] === now && wakes.top[1] === s) wakes.pop();
      if (stages[s].free > now) continue;
      const choice = choose(stages[s], now);
      if (choice) { commit(s, choice, now); left--; }
    }
    if (left) throw new Error(`list scheduling stopped with ${left} actions left: too little memory`);
    return { name, stages: stageCount, microbatches, placement, actions: stages.map((stage) => stage.order) };
  };
})((globalThis.pipepart = globalThis.pipepart || {}));
