// The schedules of pipepart.schedule, action for action: the actions of every stage, in order.
// An action is {kind, chunk, k}: kind F, B, I or W of one chunk and micro-batch k.
(function (pp) {
  "use strict";

  const KINDS = {
    gpipe: { summary: "all forwards, then all backwards" },
    "1f1b": { summary: "one forward, one backward in turn", fixedChunks: 1, slack: true },
    interleaved: { summary: "1F1B over several chunks per stage" },
    zb_h1: { summary: "split backward, memory of 1F1B", fixedChunks: 1, splits: true },
    zb_h2: { summary: "split backward, twice the memory", fixedChunks: 1, splits: true },
    zb_v: { summary: "split backward, two chunks per stage in a V", fixedChunks: 2, splits: true },
    v_half: { summary: "split backward, half the memory of 1F1B", fixedChunks: 2, splits: true },
    v_min: { summary: "split backward, a third of the memory of 1F1B", fixedChunks: 2, splits: true },
    dualpipe_v: { summary: "two chunks per stage in a V, backward split where stages would wait", fixedChunks: 2, splits: true },
    zb_1p: { summary: "split backward, searched, memory of 1F1B", fixedChunks: 1, splits: true, costs: true },
    zb_2p: { summary: "split backward, searched, twice the memory", fixedChunks: 1, splits: true, costs: true },
    forward: { summary: "forwards alone, for evaluation" },
  };

  const act = (kind, chunk, k) => ({ kind, chunk, k });

  function loopedPlacement(stages, chunks) {
    return Array.from({ length: stages * chunks }, (_, c) => c % stages);
  }

  function vPlacement(stages, chunks = 2) {
    const found = [];
    for (let turn = 0; turn < chunks; turn++)
      for (let s = 0; s < stages; s++) found.push(turn % 2 === 0 ? s : stages - 1 - s);
    return found;
  }

  function schedule(name, stages, microbatches, placement, actionsOf) {
    const actions = [];
    for (let s = 0; s < stages; s++) actions.push(actionsOf(s));
    return { name, stages, microbatches, placement, actions };
  }

  function heldBy(stage, stages, chunks) {
    return Array.from({ length: chunks }, (_, n) => stage + n * stages);
  }

  function gpipe(stages, microbatches, chunks) {
    return schedule("gpipe", stages, microbatches, loopedPlacement(stages, chunks), (stage) => {
      const held = heldBy(stage, stages, chunks), list = [];
      for (const c of held) for (let k = 0; k < microbatches; k++) list.push(act("F", c, k));
      for (const c of held.slice().reverse()) for (let k = 0; k < microbatches; k++) list.push(act("B", c, k));
      return list;
    });
  }

  function oneFOneB(stages, microbatches, slack) {
    return schedule("1f1b", stages, microbatches, loopedPlacement(stages, 1), (stage) => {
      const after = stages - 1 - stage;
      const ahead = Math.min(microbatches, after + 1 + (after ? Math.ceil((slack * after) / (stages - 1)) : 0)), list = [];
      for (let k = 0; k < ahead; k++) list.push(act("F", stage, k));
      for (let k = 0; k < microbatches; k++) {
        list.push(act("B", stage, k));
        if (k + ahead < microbatches) list.push(act("F", stage, k + ahead));
      }
      return list;
    });
  }

  function groupSizes(stages, microbatches) {
    const groups = Math.max(1, Math.floor(microbatches / stages));
    const size = Math.floor(microbatches / groups), larger = microbatches % groups;
    return Array.from({ length: groups }, (_, n) => (n < larger ? size + 1 : size));
  }

  function loopedOrder(held, groups) {
    const order = [];
    let first = 0;
    for (const size of groups) {
      for (const chunk of held) for (let k = first; k < first + size; k++) order.push([chunk, k]);
      first += size;
    }
    return order;
  }

  function interleaved(stages, microbatches, chunks) {
    const groups = groupSizes(stages, microbatches), total = microbatches * chunks;
    return schedule("interleaved", stages, microbatches, loopedPlacement(stages, chunks), (stage) => {
      const held = heldBy(stage, stages, chunks);
      const forwards = loopedOrder(held, groups), backwards = loopedOrder(held.slice().reverse(), groups);
      const after = stages - 1 - stage;
      const ahead = Math.min(total, chunks > 1 ? (chunks - 1) * groups[0] + 2 * after + 1 : after + 1);
      const list = [];
      for (let n = 0; n < ahead; n++) list.push(act("F", ...forwards[n]));
      for (let n = 0; n < total; n++) {
        list.push(act("B", ...backwards[n]));
        if (n + ahead < total) list.push(act("F", ...forwards[n + ahead]));
      }
      return list;
    });
  }

  function taken(stages, microbatches, placement, deepFirst) {
    const chunks = placement.length, held = Array.from({ length: stages }, () => []);
    for (let n = 0; n < chunks; n++) {
      const c = deepFirst ? chunks - 1 - n : n;
      held[placement[c]].push(c);
    }
    const arrived = [microbatches, ...Array(chunks).fill(0)], done = Array(chunks).fill(0);
    const orders = Array.from({ length: stages }, () => []);
    let units = 0;
    for (; done[chunks - 1] < microbatches; units++) {
      const chosen = held.map((mine) => mine.find((c) => done[c] < arrived[c]));
      chosen.forEach((chunk, stage) => {
        if (chunk !== undefined) orders[stage].push(act("F", chunk, done[chunk]++));
      });
      for (const chunk of chosen) if (chunk !== undefined) arrived[chunk + 1] = done[chunk];
    }
    return { units, orders };
  }

  function forwardOnly(stages, microbatches, placement) {
    const looped = loopedPlacement(stages, Math.floor(placement.length / stages));
    let actions;
    if (looped.length === placement.length && looped.every((home, c) => home === placement[c])) {
      const groups = groupSizes(stages, microbatches);
      actions = Array.from({ length: stages }, (_, stage) =>
        loopedOrder(heldBy(stage, stages, placement.length / stages), groups).map(([chunk, k]) => act("F", chunk, k)));
    } else {
      const deep = taken(stages, microbatches, placement, true), wide = taken(stages, microbatches, placement, false);
      actions = (wide.units < deep.units ? wide : deep).orders;
    }
    return { name: "forward", stages, microbatches, placement, actions };
  }

  function delayedWeights(name, stages, microbatches, depth) {
    return schedule(name, stages, microbatches, loopedPlacement(stages, 1), (stage) => {
      const ahead = Math.min(microbatches, depth * (stages - 1 - stage) + 1), lag = depth * stage, list = [];
      for (let k = 0; k < ahead; k++) list.push(act("F", stage, k));
      for (let k = 0; k < microbatches; k++) {
        list.push(act("I", stage, k));
        if (k >= lag) list.push(act("W", stage, k - lag));
        if (k + ahead < microbatches) list.push(act("F", stage, k + ahead));
      }
      for (let k = Math.max(0, microbatches - lag); k < microbatches; k++) list.push(act("W", stage, k));
      return list;
    });
  }

  function zbVPattern(stages, microbatches) {
    const last = 2 * stages - 1;
    return schedule("zb_v", stages, microbatches, vPlacement(stages), (stage) => {
      const full = Math.max(microbatches, 2 * stages - 1);
      const chunk = { 0: stage, 1: last - stage };
      const count = { F0: 0, F1: 0, I0: 0, I1: 0, W0: 0, W1: 0 }, list = [];
      const take = (...names) => {
        for (const name of names) {
          const k = count[name]++;
          if (k < microbatches) list.push(act(name[0], chunk[name[1]], k));
        }
      };
      for (let n = 0; n < 2 * (stages - stage) - 1; n++) take("F0");
      for (let n = 0; n < stage; n++) take("F1", "F0");
      for (let n = 0; n < stages - stage; n++) take("F1", "I1", "W1");
      while (count.F1 < full) take("F0", "I0", "W0", "F1", "I1", "W1");
      for (let n = 0; n < stage; n++) take("I0", "I1");
      for (let n = 0; n < stages - stage; n++) take("I0", "W0");
      for (const name of ["W1", "W0"]) while (count[name] < full) take(name);
      return list;
    });
  }

  function inTurn(name, stages, microbatches) {
    const limits = Array(stages).fill(Infinity);
    return pp.listSchedule(name, vPlacement(stages), microbatches, pp.evenCosts(stages, 2), limits, { patience: 0 });
  }

  function zbV(stages, microbatches) {
    return microbatches > stages ? zbVPattern(stages, microbatches) : inTurn("zb_v", stages, microbatches);
  }

  const PERIOD = 6;

  function offsets(stages, [out, home]) {
    for (let n = 0; n < PERIOD ** 3; n++) {
      const late = [Math.floor(n / 36), Math.floor(n / 6) % 6, n % 6], far = stages - 1;
      const second = out * far + 1 + late[0], firstBack = second + home * far + 1 + late[1];
      const secondBack = firstBack + out * far + 1 + late[2];
      const apart = (s) => new Set([out * s, second + home * (far - s), firstBack + out * s, secondBack + home * (far - s)]
        .map((start) => start % PERIOD)).size === 4;
      if (Array.from({ length: stages }, (_, s) => s).every(apart)) return { second, firstBack, secondBack };
    }
    throw new Error("there are offsets for every pace in use");
  }

  function repeated(name, stages, microbatches, [out, home]) {
    const { second, firstBack, secondBack } = offsets(stages, [out, home]);
    return schedule(name, stages, microbatches, vPlacement(stages), (stage) => {
      const early = stage, late = 2 * stages - 1 - stage, after = stages - 1 - stage;
      const starts = [
        ["F", early, out * stage], ["F", late, second + home * after],
        ["I", late, firstBack + out * stage], ["I", early, secondBack + home * after],
      ];
      const taken = new Set(starts.map(([, , start]) => start % PERIOD));
      for (const [, chunk, start] of starts.slice(2)) {
        let at = start + 1;
        while (taken.has(at % PERIOD)) at++;
        starts.push(["W", chunk, at]);
        taken.add(at % PERIOD);
      }
      const list = [];
      for (const [kind, chunk, start] of starts)
        for (let k = 0; k < microbatches; k++) list.push([start + PERIOD * k, act(kind, chunk, k)]);
      return list.sort((a, b) => a[0] - b[0]).map(([, action]) => action);
    });
  }

  function dualpipeV(stages, microbatches) {
    if (microbatches < 2 * stages) return inTurn("dualpipe_v", stages, microbatches);
    return schedule("dualpipe_v", stages, microbatches, vPlacement(stages), (stage) => {
      const after = stages - 1 - stage, chunks = [stage, 2 * stages - 1 - stage];
      const count = { F0: 0, F1: 0, B0: 0, B1: 0, W0: 0, W1: 0 }, list = [], late = [];
      const take = (...names) => {
        for (const name of names) {
          if (name[0] === "B") count[`W${name[1]}`]++;
          list.push(act(name[0], chunks[name[1]], count[(name[0] === "I" ? "B" : name[0]) + name[1]]++));
        }
      };
      for (let n = 0; n < 2 * after; n++) take("F0");
      for (let n = 0; n < stage + 1; n++) take("F0", "F1");
      for (let n = 0; n < after; n++) take("I1", "W1", "F1");
      for (let n = 0; n < microbatches - 2 * stages + stage + 1; n++) take("F0", "B1", "F1", "B0");
      for (let n = 0; n < after; n++) take("B1", "F1", "B0");
      const half = Math.floor((stage + 1) / 2);
      for (let n = 0; n < stage + 1; n++)
        for (const chunk of "10") {
          const split = n > half || (n === half && (stage % 2 === 1 || chunk === "0"));
          take((split ? "I" : "B") + chunk);
          if (split) late.push(`W${chunk}`);
        }
      for (let n = 0; n < after; n++) {
        if (late.length) take(late.shift());
        take("I0");
        late.push("W0");
      }
      take(...late);
      return list;
    });
  }

  /** The schedule of that name; chunks is per stage, costs are for schedules that are searched. Throws an error with a sentence for the user if it is impossible. */
  pp.makeSchedule = function (name, { stages, microbatches, chunks = 1, slack = 0, placement = null, costs = null }) {
    const kind = KINDS[name];
    if (!kind) throw new Error(`schedule ${name} is not known`);
    if (kind.fixedChunks && kind.fixedChunks !== chunks)
      throw new Error(`${name} needs ${kind.fixedChunks} chunk${kind.fixedChunks > 1 ? "s" : ""} per stage, got ${chunks}`);
    if (!kind.slack) slack = 0;
    switch (name) {
      case "gpipe": return gpipe(stages, microbatches, chunks);
      case "1f1b": return oneFOneB(stages, microbatches, slack);
      case "interleaved": return interleaved(stages, microbatches, chunks);
      case "zb_h1": return delayedWeights("zb_h1", stages, microbatches, 1);
      case "zb_h2": return delayedWeights("zb_h2", stages, microbatches, 2);
      case "zb_v": return zbV(stages, microbatches);
      case "v_half": return repeated("v_half", stages, microbatches, [2, 1]);
      case "v_min": return repeated("v_min", stages, microbatches, [1, 1]);
      case "dualpipe_v": return dualpipeV(stages, microbatches);
      case "zb_1p": return pp.searchedSchedule("zb_1p", stages, microbatches, costs || pp.evenCosts(stages, 1), 1);
      case "zb_2p": return pp.searchedSchedule("zb_2p", stages, microbatches, costs || pp.evenCosts(stages, 1), 2);
      case "forward": return forwardOnly(stages, microbatches, placement || loopedPlacement(stages, chunks));
      default: throw new Error(`schedule ${name} is not known`);
    }
  };

  /** Per stage: the largest live activations. They follow from the order alone. */
  pp.peakActivations = function (schedule, activation = null, kept = 1) {
    const forward = schedule.actions.every((list) => list.every((a) => a.kind === "F"));
    return schedule.actions.map((list) => {
      let live = 0, peak = 0;
      for (const a of list) {
        const size = activation ? activation[a.chunk] : 1;
        if (a.kind === "F") {
          live += size;
          peak = Math.max(peak, live);
          if (forward) live -= size;
        } else if (a.kind === "B") live -= size;
        else live -= size * (a.kind === "W" ? kept : 1 - kept);
      }
      return peak;
    });
  };

  pp.SCHEDULE_KINDS = KINDS;
  pp.vPlacement = vPlacement;
  pp.loopedPlacement = loopedPlacement;
})((globalThis.pipepart = globalThis.pipepart || {}));
