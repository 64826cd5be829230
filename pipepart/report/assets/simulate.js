// The event simulator of pipepart.schedule, in JavaScript: a schedule and its costs give a timeline.
// It does the same arithmetic in the same order, so that it agrees with the one in Python to the last bits.
(function (pp) {
  "use strict";

  /** A binary heap of [time, tie-break], smallest first. */
  class Heap {
    constructor() { this.items = []; }
    get size() { return this.items.length; }
    get top() { return this.items[0]; }
    static less(a, b) { return a[0] < b[0] || (a[0] === b[0] && a[1] < b[1]); }
    push(item) {
      const items = this.items;
      let i = items.length;
      items.push(item);
      while (i > 0) {
        const parent = (i - 1) >> 1;
        if (!Heap.less(item, items[parent])) break;
        items[i] = items[parent];
        i = parent;
      }
      items[i] = item;
    }
    pop() {
      const items = this.items, top = items[0], last = items.pop();
      if (items.length) {
        let i = 0;
        for (;;) {
          let child = 2 * i + 1;
          if (child >= items.length) break;
          if (child + 1 < items.length && Heap.less(items[child + 1], items[child])) child++;
          if (!Heap.less(items[child], last)) break;
          items[i] = items[child];
          i = child;
        }
        items[i] = last;
      }
      return top;
    }
  }
  pp.Heap = Heap;

  const byPair = (a, b) => a[0] - b[0] || a[1] - b[1];

  pp.chainEdges = function (chunks) {
    const pairs = Array.from({ length: Math.max(0, chunks - 1) }, (_, c) => [c, c + 1]);
    return { forward: pairs, backward: pairs, tied: [] };
  };

  /** Equal stages, as ChunkCosts.even makes them. */
  pp.evenCosts = function (stages, chunks) {
    const share = () => Array(stages * chunks).fill(1 / chunks);
    return pp.fillCosts({ forward: share(), backward_input: share(), backward_weight: share(), activation: share() });
  };

  /** Costs with defaults for missing entries. sends are lists of [source, target, seconds]. */
  pp.fillCosts = function (given) {
    const n = given.forward.length, zeros = () => Array(n).fill(0);
    const full = (values) => values && values.length > 0;
    return {
      forward: given.forward,
      backward_input: given.backward_input,
      backward_weight: given.backward_weight,
      backward: full(given.backward)
        ? given.backward
        : given.backward_input.map((value, c) => value + given.backward_weight[c]),
      recompute: full(given.recompute) ? given.recompute : zeros(),
      activation: full(given.activation) ? given.activation : Array(n).fill(1),
      kept_for_weight: given.kept_for_weight === undefined ? 1 : given.kept_for_weight,
      send_forward: given.send_forward || [],
      send_backward: given.send_backward || [],
      contention: Boolean(given.contention),
      handling_forward: full(given.handling_forward) ? given.handling_forward : zeros(),
      handling_backward: full(given.handling_backward) ? given.handling_backward : zeros(),
      reduce: full(given.reduce) ? given.reduce : zeros(),
      reduce_tied: given.reduce_tied || [],
    };
  };

  function table(sends) {
    const found = new Map();
    for (const [source, target, seconds] of sends) found.set(source * 65536 + target, seconds);
    return (source, target) => found.get(source * 65536 + target) || 0;
  }

  /** The numbered actions with their dependencies: needs[n], users[n], stage[n], first[stage]. */
  function actionGraph(schedule, edges) {
    const chunks = schedule.placement.length, m = schedule.microbatches;
    const actions = [], stage = [], first = [0];
    const number = { F: new Int32Array(chunks * m).fill(-1), I: new Int32Array(chunks * m).fill(-1) };
    const back = new Int32Array(chunks * m).fill(-1);
    schedule.actions.forEach((list, s) => {
      for (const a of list) {
        const at = a.chunk * m + a.k;
        if (a.kind === "F") number.F[at] = actions.length;
        else if (a.kind === "I") number.I[at] = back[at] = actions.length;
        else if (a.kind === "B") back[at] = actions.length;
        actions.push(a);
        stage.push(s);
      }
      first.push(actions.length);
    });
    const sources = Array.from({ length: chunks }, () => []), targets = Array.from({ length: chunks }, () => []);
    for (const [source, target] of edges.forward.slice().sort(byPair)) sources[target].push(source);
    for (const [source, target] of edges.backward.slice().sort(byPair)) targets[source].push(target);
    const needs = [], users = actions.map(() => []);
    actions.forEach((a, n) => {
      let found;
      if (a.kind === "F") found = sources[a.chunk].map((source) => number.F[source * m + a.k]);
      else if (a.kind === "W") found = [number.I[a.chunk * m + a.k]];
      else found = [number.F[a.chunk * m + a.k], ...targets[a.chunk].map((target) => back[target * m + a.k])];
      for (const need of found) {
        if (need < 0) throw new Error(`${schedule.name}: ${a.kind}${a.chunk}.${a.k} needs an action that is in no list`);
        users[need].push(n);
      }
      needs.push(found);
    });
    if (sources.some((l) => l.length > 1) || targets.some((l) => l.length > 1)) {
      users.forEach((mates, n) => {
        const here = actions[n].chunk;
        mates.sort((a, b) => Math.abs(actions[a].chunk - here) - Math.abs(actions[b].chunk - here) || a - b);
      });
    }
    return { actions, stage, first, needs, users };
  }

  /** The links under contention: a stage sends one message at a time and receives one at a time. A message starts as
      soon as both ends are free; of those that wait for the same end, the one that was ready first. */
  class Ports {
    constructor(stages) {
      this.outBusy = Array(stages).fill(false);
      this.inBusy = Array(stages).fill(false);
      this.pairs = new Map();
      this.ofSender = Array.from({ length: stages }, () => []);
      this.ofReceiver = Array.from({ length: stages }, () => []);
    }
    add(message, sender, receiver, seconds) {
      const key = sender * 65536 + receiver;
      if (!this.pairs.has(key)) {
        const pair = { sender, receiver, queue: [], at: 0 };
        this.pairs.set(key, pair);
        this.ofSender[sender].push(pair);
        this.ofReceiver[receiver].push(pair);
      }
      this.pairs.get(key).queue.push([message, seconds]);
    }
    start(senders, receivers) {
      const begun = [], pairs = new Set([...senders.flatMap((n) => this.ofSender[n]), ...receivers.flatMap((n) => this.ofReceiver[n])]);
      for (;;) {
        let best = null;
        for (const pair of pairs) {
          if (pair.at >= pair.queue.length || this.outBusy[pair.sender] || this.inBusy[pair.receiver]) continue;
          if (!best || pair.queue[pair.at][0] < best.queue[best.at][0]) best = pair;
        }
        if (!best) return begun;
        this.outBusy[best.sender] = this.inBusy[best.receiver] = true;
        begun.push(best.queue[best.at++]);
      }
    }
  }

  function run(graph, schedule, costs, sends) {
    const { actions, stage: stageOf, first, needs, users } = graph;
    const seconds = actions.map((a) => {
      if (a.kind === "F") return costs.forward[a.chunk];
      if (a.kind === "B") return costs.backward[a.chunk] + costs.recompute[a.chunk];
      if (a.kind === "I") return costs.backward_input[a.chunk] + costs.recompute[a.chunk];
      return costs.backward_weight[a.chunk];
    });
    const handling = actions.map((a) => (a.kind === "W" ? 0 : (a.kind === "F" ? costs.handling_forward : costs.handling_backward)[a.chunk]));
    const ahead = table(costs.send_forward), behind = table(costs.send_backward);
    const ports = costs.contention ? new Ports(schedule.stages) : null, moves = [];
    const waiting = needs.map((need) => need.length);
    const arrived = new Float64Array(actions.length);
    const start = new Float64Array(actions.length), end = new Float64Array(actions.length);
    const cursor = first.slice(0, -1), free = Array(schedule.stages).fill(0);
    const running = new Heap(); // [end, action], or [end, -1 - message]
    const begin = (stage) => {
      let n = cursor[stage], time = free[stage];
      while (n < first[stage + 1] && waiting[n] === 0) {
        start[n] = (arrived[n] > time ? arrived[n] : time) + handling[n];
        end[n] = time = start[n] + seconds[n];
        running.push([time, n]);
        n++;
      }
      cursor[stage] = n;
      free[stage] = time;
    };
    const sent = (n, user, leave, arrive) => {
      const a = actions[n], payload = a.kind === "F" ? "F" : "B";
      sends.push({ stage: stageOf[n], kind: "SEND", chunk: a.chunk, k: a.k, peer: actions[user].chunk, payload, start: leave, end: arrive });
    };
    const startMoves = (now, senders, receivers) => {
      for (const [message, cost] of ports.start(senders, receivers)) {
        running.push([now + cost, -1 - message]);
        sent(...moves[message], now, now + cost);
      }
    };
    for (let s = 0; s < schedule.stages; s++) begin(s);
    let finished = 0;
    while (running.size) {
      const [now, n] = running.pop();
      if (n < 0) {
        const [source, user] = moves[-1 - n];
        ports.outBusy[stageOf[source]] = ports.inBusy[stageOf[user]] = false;
        startMoves(now, [stageOf[source]], [stageOf[user]]);
        waiting[user]--;
        arrived[user] = Math.max(arrived[user], now);
        begin(stageOf[user]);
        continue;
      }
      finished++;
      const stage = stageOf[n], action = actions[n];
      let asked = false;
      for (const user of users[n]) {
        const home = stageOf[user];
        let when = now;
        if (home !== stage) {
          const target = actions[user].chunk;
          const cost = action.kind === "F" ? ahead(action.chunk, target) : behind(target, action.chunk);
          if (cost && ports) {
            ports.add(moves.length, stage, home, cost);
            moves.push([n, user]);
            asked = true;
            continue;
          }
          if (cost) {
            when = now + cost;
            sent(n, user, now, when);
          }
        }
        waiting[user]--;
        if (when > arrived[user]) arrived[user] = when;
        if (waiting[user] === 0) begin(home);
      }
      if (asked) startMoves(now, [stage], []);
    }
    if (finished < actions.length) throw new Error(`${schedule.name}: this order cannot be carried out`);
    return { start, end };
  }

  function reductions(graph, schedule, costs, edges, end) {
    const final = new Map(), done = Array(schedule.stages).fill(0);
    graph.actions.forEach((a, n) => {
      if (a.kind !== "B" && a.kind !== "W") return;
      final.set(a.chunk, Math.max(final.get(a.chunk) || 0, end[n]));
      done[graph.stage[n]] = Math.max(done[graph.stage[n]], end[n]);
    });
    const free = Array(schedule.stages).fill(0), events = [], k = schedule.microbatches - 1;
    const push = (stage, chunk, start, stop) =>
      events.push({ stage, kind: "REDUCE", chunk, k, peer: null, payload: null, start, end: stop });
    for (const chunk of [...final.keys()].sort((a, b) => final.get(a) - final.get(b) || a - b)) {
      if (!costs.reduce[chunk]) continue;
      const stage = schedule.placement[chunk], start = Math.max(final.get(chunk), free[stage]);
      free[stage] = start + costs.reduce[chunk];
      push(stage, chunk, start, free[stage]);
    }
    (edges.tied || []).forEach((group, n) => {
      const seconds = costs.reduce_tied[n];
      const stages = [...new Set(group.map((c) => schedule.placement[c]))].sort((a, b) => a - b);
      if (stages.length < 2 || !seconds || group.some((c) => !final.has(c))) return;
      const start = Math.max(...stages.map((s) => Math.max(done[s], free[s])));
      for (const stage of stages) {
        free[stage] = start + seconds;
        push(stage, group.find((c) => schedule.placement[c] === stage), start, free[stage]);
      }
    });
    return events;
  }

  /** The start and end of every action of a schedule. edges: {forward, backward, tied}, by default the plain chain. */
  pp.simulate = function (schedule, costs, edges = null) {
    edges = edges || pp.chainEdges(schedule.placement.length);
    if (costs.forward.length !== schedule.placement.length)
      throw new Error(`the schedule has ${schedule.placement.length} chunks, the costs have ${costs.forward.length}`);
    const graph = actionGraph(schedule, edges), sends = [];
    const { start, end } = run(graph, schedule, costs, sends);
    const events = graph.actions.map((a, n) => (
      { stage: graph.stage[n], kind: a.kind, chunk: a.chunk, k: a.k, peer: null, payload: null, start: start[n], end: end[n] }
    ));
    events.push(...sends, ...reductions(graph, schedule, costs, edges, end));
    events.sort((a, b) => a.start - b.start);
    return pp.timeline({
      stages: schedule.stages, events, edges, activation: costs.activation, kept: costs.kept_for_weight,
      placement: schedule.placement,
    });
  };
})((globalThis.pipepart = globalThis.pipepart || {}));
