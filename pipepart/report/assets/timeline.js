// Figures of a timeline (predicted, measured, or simulated in the page): the same as those of pipepart.schedule.Timeline.
(function (pp) {
  "use strict";
  const COMPUTE = new Set(["F", "B", "I", "W"]);
  pp.COMPUTE = COMPUTE;

  /** Wrap plain events with the figures that the page shows. placement (chunk to stage) may be left out. */
  pp.timeline = function ({ stages, events, edges, activation, kept = 1, placement = null }) {
    let first = Infinity, last = 0;
    for (const e of events) {
      if (e.end > last) last = e.end;
      if (e.start < first) first = e.start;
    }
    const compute = Array.from({ length: stages }, () => []);
    if (!placement) {
      placement = [];
      for (const e of events) placement[e.chunk] = e.stage;
    }
    for (const e of events) if (COMPUTE.has(e.kind)) compute[e.stage].push(e);
    const stepTime = events.length ? last - first : 0;
    const busy = compute.map((mine) => mine.reduce((sum, e) => sum + (e.end - e.start), 0));
    const idle = busy.map((b) => stepTime - b);
    const whole = stepTime * stages;
    return {
      stages, events, edges: edges || pp.chainEdges(placement.length), activation: activation || [], kept, placement,
      compute, stepTime, busy, idle, bubble: whole ? idle.reduce((a, b) => a + b, 0) / whole : 0,
    };
  };

  /** From the columns of the page's data. */
  pp.unpackTimeline = function (data) {
    const { columns: c, kinds } = data;
    const events = c.stage.map((stage, n) => ({
      stage, kind: kinds[c.kind[n]], chunk: c.chunk[n], k: c.microbatch[n],
      peer: c.peer[n] < 0 ? null : c.peer[n], payload: c.payload[n] === 0 ? null : c.payload[n] === 1 ? "F" : "B",
      start: c.start[n], end: c.end[n],
    }));
    return pp.timeline({ ...data, events });
  };

  pp.actionName = function (e) {
    if (e.kind === "SEND") return `SEND ${e.payload} ${e.chunk}>${e.peer} .${e.k}`;
    if (e.kind === "RECV") return `RECV ${e.payload} ${e.peer}>${e.chunk} .${e.k}`;
    if (e.kind === "REDUCE") return `REDUCE ${e.chunk}`;
    return `${e.kind}${e.chunk}.${e.k}`;
  };

  /** Per stage: [[time, live activations], ...] at each change. */
  pp.memoryCurves = function (timeline) {
    const full = new Set();
    for (const mine of timeline.compute) for (const e of mine) if (e.kind === "B" || e.kind === "W") full.add(e.chunk);
    return timeline.compute.map((mine) => {
      const changes = [];
      for (const e of mine) {
        const size = timeline.activation.length ? timeline.activation[e.chunk] : 1;
        if (e.kind === "F") {
          changes.push([e.start, 1, size]);
          if (!full.has(e.chunk)) changes.push([e.end, 0, -size]);
        } else if (e.kind === "I") changes.push([e.end, 0, -size * (1 - timeline.kept)]);
        else changes.push([e.end, 0, -size * (e.kind === "W" ? timeline.kept : 1)]);
      }
      changes.sort((a, b) => a[0] - b[0] || a[1] - b[1] || a[2] - b[2]);
      let level = 0;
      const curve = [[0, 0]];
      for (const [time, , change] of changes) {
        level += change;
        if (curve[curve.length - 1][0] === time) curve.pop();
        curve.push([time, level]);
      }
      return curve;
    });
  };

  pp.peaks = (timeline) => pp.memoryCurves(timeline).map((curve) => curve.reduce((top, p) => Math.max(top, p[1]), 0));

  function mergeSpans(spans) {
    spans.sort((a, b) => a[0] - b[0]);
    const merged = [];
    for (const [start, end] of spans) {
      const last = merged[merged.length - 1];
      if (last && start <= last[1]) last[1] = Math.max(last[1], end);
      else merged.push([start, end]);
    }
    return merged;
  }

  /** Receives that a simulated timeline leaves out: a message is received while it is on its link. */
  pp.impliedReceives = function ({ events, placement }) {
    if (events.some((e) => e.kind === "RECV")) return [];
    return events.filter((e) => e.kind === "SEND" && placement[e.peer] !== undefined).map((e) => ({
      stage: placement[e.peer], kind: "RECV", chunk: e.peer, k: e.k, peer: e.chunk, payload: e.payload, start: e.start, end: e.end,
    }));
  };

  /** Per stage: seconds of each kind of compute, of waiting while a message for or from the stage is on its way, of idling. */
  pp.stageShares = function (timeline) {
    const spans = Array.from({ length: timeline.stages }, () => []), sent = new Map();
    for (const e of timeline.events) if (e.kind === "SEND") sent.set(`${e.payload} ${e.chunk} ${e.peer} ${e.k}`, e.start);
    for (const e of [...timeline.events, ...pp.impliedReceives(timeline)]) {
      // a stage is idle while its message is not yet sent
      const left = e.kind === "RECV" ? sent.get(`${e.payload} ${e.peer} ${e.chunk} ${e.k}`) : undefined;
      if (!COMPUTE.has(e.kind)) spans[e.stage].push([left > e.start ? Math.min(left, e.end) : e.start, e.end]);
    }
    return timeline.compute.map((mine, stage) => {
      const shares = { F: 0, B: 0, I: 0, W: 0, communication: 0, idle: 0 };
      for (const e of mine) shares[e.kind] += e.end - e.start;
      const work = mergeSpans(mine.map((e) => [e.start, e.end]));
      let at = 0;
      for (const [start, end] of mergeSpans(spans[stage])) {
        // the part of the span without compute
        let covered = 0;
        while (at > 0 && work[at - 1] && work[at - 1][1] > start) at--;
        while (at < work.length && work[at][1] <= start) at++;
        for (let n = at; n < work.length && work[n][0] < end; n++)
          covered += Math.min(end, work[n][1]) - Math.max(start, work[n][0]);
        shares.communication += Math.max(0, end - start - covered);
      }
      shares.idle = Math.max(0, timeline.stepTime - timeline.busy[stage] - shares.communication);
      return shares;
    });
  };

  /** Every message between stages: [producer, consumer, its send or null, its receive or null]; receives adds to the events. */
  pp.flows = function (timeline, receives = []) {
    const done = new Map(), sent = new Map(), received = new Map();
    const key = (kind, chunk, k) => `${kind === "I" ? "B" : kind} ${chunk} ${k}`;
    for (const e of [...timeline.events, ...receives]) {
      if (COMPUTE.has(e.kind)) done.set(key(e.kind, e.chunk, e.k), e);
      else if (e.kind === "SEND") sent.set(`${e.payload} ${e.chunk} ${e.peer} ${e.k}`, e);
      else if (e.kind === "RECV") received.set(`${e.payload} ${e.peer} ${e.chunk} ${e.k}`, e);
    }
    const sources = new Map(), targets = new Map();
    const add = (map, at, value) => (map.get(at) || map.set(at, []).get(at)).push(value);
    for (const [a, b] of timeline.edges.forward) add(sources, b, a);
    for (const [a, b] of timeline.edges.backward) add(targets, a, b);
    const found = [];
    for (const e of done.values()) {
      const others = e.kind === "F" ? sources.get(e.chunk) : e.kind === "W" ? [] : targets.get(e.chunk);
      for (const other of others || []) {
        const payload = e.kind === "F" ? "F" : "B", from = done.get(key(payload, other, e.k));
        const message = `${payload} ${other} ${e.chunk} ${e.k}`;
        if (from && from.stage !== e.stage) found.push([from, e, sent.get(message) || null, received.get(message) || null]);
      }
    }
    return found;
  };

  /** The chain of events that determines the step time, first to last. */
  pp.criticalPath = function (timeline) {
    const { events, edges } = timeline;
    if (!events.length) return [];
    const computed = new Map(), sent = new Map(), lanes = new Map(), home = timeline.placement;
    const push = (key, e) => (lanes.get(key) || lanes.set(key, []).get(key)).push(e);
    for (const e of events) {
      if (COMPUTE.has(e.kind)) {
        computed.set(`${e.kind === "I" ? "B" : e.kind} ${e.chunk} ${e.k}`, e);
        push(`compute ${e.stage}`, e);
      } else if (e.kind === "SEND") {
        sent.set(`${e.payload} ${e.chunk} ${e.peer} ${e.k}`, e);
        push(`out ${e.stage}`, e);
        push(`in ${home[e.peer]}`, e);
      } else if (e.kind === "REDUCE") push(`reduce ${e.stage}`, e);
    }
    for (const lane of lanes.values()) lane.sort((a, b) => a.end - b.end);
    const sources = new Map(), targets = new Map();
    const add = (map, at, value) => (map.get(at) || map.set(at, []).get(at)).push(value);
    for (const [a, b] of edges.forward) add(sources, b, a);
    for (const [a, b] of edges.backward) add(targets, a, b);
    const before = (key, e) => {
      const lane = lanes.get(key) || [];
      let low = 0, high = lane.length;
      while (low < high) {
        const mid = (low + high) >> 1;
        if (lane[mid].end <= e.start) low = mid + 1;
        else high = mid;
      }
      let at = low - 1;
      while (at >= 0 && lane[at] === e) at--;
      return at >= 0 ? lane[at] : null;
    };
    // A measured send may end after its message was used: the event has then waited for the producer of the message.
    const produced = (payload, source, target, k) =>
      [sent.get(`${payload} ${source} ${target} ${k}`), computed.get(`${payload} ${source} ${k}`)];
    const waitedFor = (e) => {
      if (e.kind === "SEND")
        return [computed.get(`${e.payload} ${e.chunk} ${e.k}`), before(`out ${e.stage}`, e), before(`in ${home[e.peer]}`, e)];
      if (e.kind === "REDUCE") {
        const own = [before(`compute ${e.stage}`, e), before(`reduce ${e.stage}`, e)];
        if (own.some((other) => other && other.end >= e.start - 1e-12)) return own;
        return own.concat(timeline.compute.map((_, stage) => before(`compute ${stage}`, e)));
      }
      const same = before(`compute ${e.stage}`, e);
      if (e.kind === "F") return [same, ...(sources.get(e.chunk) || []).flatMap((s) => produced("F", s, e.chunk, e.k))];
      if (e.kind === "W") return [same, computed.get(`B ${e.chunk} ${e.k}`)];
      return [same, computed.get(`F ${e.chunk} ${e.k}`), ...(targets.get(e.chunk) || []).flatMap((t) => produced("B", t, e.chunk, e.k))];
    };
    let event = events[0];
    for (const e of events) if (e.end > event.end || (e.end === event.end && e.start > event.start)) event = e;
    const path = [event], seen = new Set(path);
    for (;;) {
      let latest = null;
      for (const e of waitedFor(event))
        if (e && !seen.has(e) && e.end <= event.start + 1e-12 && (!latest || e.end > latest.end)) latest = e;
      if (!latest) return path.reverse();
      event = latest;
      path.push(event);
      seen.add(event);
    }
  };
})((globalThis.pipepart = globalThis.pipepart || {}));
