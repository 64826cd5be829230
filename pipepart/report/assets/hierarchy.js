// The ops of a graph as a tree of modules (or of chunks, then modules), and the edges between its visible boxes.
(function (pp) {
  "use strict";
  const CROWD = 120, BUNDLE = 40;

  /** The page's columns as functions of an op. */
  pp.graphOf = function (data) {
    const { columns, words } = data, edges = data.edges, count = columns.name.length;
    const out = Array.from({ length: count }, () => []), into = Array.from({ length: count }, () => []);
    for (let n = 0; n < edges.length; n += 2) {
      out[edges[n]].push(edges[n + 1]);
      into[edges[n + 1]].push(edges[n]);
    }
    const word = (field) => (op) => words[columns[field][op]];
    const value = (field) => (op) => (columns[field].length ? columns[field][op] : 0);
    return {
      count, out, into, known: data.known, tied: data.tied,
      name: (op) => columns.name[op], kind: word("kind"), target: word("target"), module: word("module"),
      moduleClass: word("module_class"), source: word("source"), shape: word("shape"), dtype: word("dtype"),
      outputBytes: value("output_bytes"), flops: value("flops"), saved: value("saved_bytes"), forward: value("forward"),
      backward: (op) => value("backward_input")(op) + value("backward_weight")(op),
      parameters: (op) => data.parameters[op].map((n) => words[n]), parameterBytes: value("parameter_bytes"),
    };
  };

  /** Groups of nodes that can reach each other (Tarjan, without recursion): the component of each node. */
  function components(count, next) {
    const index = new Int32Array(count).fill(-1), low = new Int32Array(count), part = new Int32Array(count).fill(-1);
    const stack = [];
    let counter = 0, parts = 0;
    for (let root = 0; root < count; root++) {
      if (index[root] >= 0) continue;
      const work = [[root, 0]];
      while (work.length) {
        const frame = work[work.length - 1], [node] = frame;
        if (frame[1] === 0) { index[node] = low[node] = counter++; stack.push(node); }
        if (frame[1] < next[node].length) {
          const other = next[node][frame[1]++];
          if (index[other] < 0) work.push([other, 0]);
          else if (part[other] < 0) low[node] = Math.min(low[node], index[other]);
          continue;
        }
        work.pop();
        if (work.length) { const up = work[work.length - 1][0]; low[up] = Math.min(low[up], low[node]); }
        if (low[node] === index[node]) {
          for (;;) { const member = stack.pop(); part[member] = parts; if (member === node) break; }
          parts++;
        }
      }
    }
    return part;
  }

  const group = (label, path, children) => ({ label, path, children, op: -1, open: false, parent: null });

  /** The tree. mode "module": by module path; mode "stage": by chunk first. A module that is used again later, so that
      data flows out of it and back in, appears once for each use. */
  pp.buildTree = function (graph, plan, mode) {
    const segments = Array.from({ length: graph.count }, (_, op) => {
      const path = graph.module(op) ? graph.module(op).split(".") : [];
      return mode === "stage" ? [null, ...path] : path;
    });
    const slot = new Int32Array(graph.count).fill(-1);

    function partition(ops, depth) {
      const names = new Map(), parts = [];
      for (const op of ops) {
        let key = segments[op][depth];
        if (mode === "stage" && depth === 0) key = `#${plan.chunk_of[op]}`;
        if (key === undefined) { parts.push({ op, ops: [op] }); continue; }
        if (!names.has(key)) { names.set(key, parts.length); parts.push({ key, op: -1, ops: [] }); }
        parts[names.get(key)].ops.push(op);
      }
      return parts;
    }

    function untangle(parts, depth) {
      if (mode === "stage" && depth === 0) return parts;
      parts.forEach((part, n) => part.ops.forEach((op) => { slot[op] = n; }));
      const mine = new Set(parts.flatMap((part) => part.ops));
      const next = parts.map((part, n) => [...new Set(part.ops.flatMap((op) => graph.out[op]).filter((t) => mine.has(t)).map((t) => slot[t]))].filter((t) => t !== n));
      const component = components(parts.length, next), size = new Map();
      component.forEach((c) => size.set(c, (size.get(c) || 0) + 1));
      if (![...size.values()].some((n) => n > 1)) return parts;
      const found = parts.filter((_, n) => size.get(component[n]) === 1);
      for (const [c, n] of size) {
        if (n === 1) continue;
        const tangled = parts.map((part, at) => ({ part, at })).filter(({ at }) => component[at] === c);
        const owner = new Map(tangled.flatMap(({ part }) => part.ops.map((op) => [op, part])));
        let last = null, run = null;
        const times = new Map();
        for (const op of [...owner.keys()].sort((a, b) => a - b)) {
          const part = owner.get(op);
          if (part !== last || part.op >= 0) {
            const use = (times.get(part) || 0) + 1;
            times.set(part, use);
            run = { key: part.key, op: part.op, ops: [], use };
            found.push(run);
            last = part;
          }
          run.ops.push(op);
        }
      }
      return found;
    }

    function build(ops, depth, path) {
      const parts = untangle(partition(ops, depth), depth);
      const nodes = parts.map((part) => {
        if (part.op >= 0) return { label: graph.name(part.op), path: graph.module(part.op), children: [], op: part.op, open: false, parent: null, first: part.op };
        if (mode === "stage" && depth === 0) {
          const chunk = plan.chunk_of[part.ops[0]];
          const node = group(`stage ${plan.placement[chunk]}${plan.chunks_per_stage > 1 ? `, chunk ${chunk}` : ""}`, "", build(part.ops, 1, ""));
          return { ...node, chunk, first: part.ops[0] };
        }
        const full = path ? `${path}.${part.key}` : part.key;
        const node = group(part.use > 1 ? `${part.key} (${part.use})` : part.key, full, build(part.ops, depth + 1, full));
        node.first = part.ops[0];
        const only = node.children.length === 1 ? node.children[0] : null;
        if (!only) return node;
        return { ...only, label: only.op >= 0 ? node.label : `${node.label}.${only.label}`, path: only.path || full };
      });
      return bundled(inOrder(nodes, parts));
    }

    /** Siblings in an order in which producers come before their users; otherwise in program order. */
    function inOrder(nodes, parts) {
      parts.forEach((part, n) => part.ops.forEach((op) => { slot[op] = n; }));
      const mine = new Set(parts.flatMap((part) => part.ops)), waiting = new Int32Array(nodes.length), next = nodes.map(() => new Set());
      parts.forEach((part, n) => {
        for (const op of part.ops) for (const t of graph.out[op]) if (mine.has(t) && slot[t] !== n) next[n].add(slot[t]);
      });
      next.forEach((targets) => targets.forEach((t) => { waiting[t]++; }));
      const ready = new pp.Heap(), left = new Set(nodes.keys()), order = [];
      nodes.forEach((node, n) => { if (!waiting[n]) ready.push([node.first, n]); });
      while (left.size) {
        if (!ready.size) { // a cycle that could not be resolved: continue with its first op
          const n = [...left].reduce((a, b) => (nodes[b].first < nodes[a].first ? b : a));
          ready.push([nodes[n].first, n]);
        }
        const [, n] = ready.pop();
        if (!left.delete(n)) continue;
        order.push(nodes[n]);
        next[n].forEach((t) => { if (--waiting[t] === 0 && left.has(t)) ready.push([nodes[t].first, t]); });
      }
      return order;
    }

    /** Too many children for one picture: neighbours in program order become bundles that open like modules. */
    function bundled(nodes) {
      while (nodes.length > CROWD) {
        const found = [];
        let current = [];
        const chunkOf = (node) => plan.chunk_of[node.first];
        const close = () => {
          if (current.length === 1) found.push(current[0]);
          else if (current.length) {
            const last = current[current.length - 1];
            const node = group(`${current[0].label} … ${last.label}`, current[0].path, current);
            found.push({ ...node, first: current[0].first, bundle: true });
          }
          current = [];
        };
        for (const node of nodes) {
          if (current.length >= BUNDLE || (current.length && chunkOf(current[current.length - 1]) !== chunkOf(node))) close();
          current.push(node);
        }
        close();
        if (found.length === nodes.length) break;
        nodes = found;
      }
      return nodes;
    }

    const root = group("model", "", build(Array.from({ length: graph.count }, (_, n) => n), 0, ""));
    root.open = true;
    root.first = 0;
    let number = 0;
    const leaf = new Array(graph.count);
    const total = () => ({ ops: 0, forward: 0, backward: 0, saved: 0, flops: 0, bytes: 0 });
    (function finish(node, parent, depth) {
      Object.assign(node, { id: number++, parent, depth, sum: total(), stages: new Map(), parameters: new Map() });
      if (node.op >= 0) {
        const op = node.op, stage = plan.placement[plan.chunk_of[op]], time = graph.forward(op) + graph.backward(op);
        leaf[op] = node;
        node.sum = { ops: 1, forward: graph.forward(op), backward: graph.backward(op), saved: graph.saved(op), flops: graph.flops(op) };
        node.stages.set(stage, [1, time]);
        const names = graph.parameters(op);
        if (names.length) node.parameters.set(names.join("\n"), { names, bytes: graph.parameterBytes(op) });
      }
      for (const child of node.children) {
        finish(child, node, depth + 1);
        for (const key of ["ops", "forward", "backward", "saved", "flops"]) node.sum[key] += child.sum[key];
        for (const [key, held] of child.parameters) node.parameters.set(key, held); // tied weights count once
        for (const [stage, [n, time]] of child.stages) {
          const mine = node.stages.get(stage) || [0, 0];
          node.stages.set(stage, [mine[0] + n, mine[1] + time]);
        }
      }
    })(root, null, 0);
    return { root, leaf, mode, size: number };
  };

  /** Open the largest groups as long as no more than so many nodes are visible. */
  pp.openUpTo = function (tree, most) {
    let seen = tree.root.children.length;
    const waiting = tree.root.children.filter((n) => n.children.length);
    while (waiting.length) {
      waiting.sort((a, b) => a.depth - b.depth || a.children.length - b.children.length);
      const level = waiting.filter((n) => n.depth === waiting[0].depth && !n.bundle);
      const more = level.reduce((sum, n) => sum + n.children.length, 0);
      if (!level.length || seen + more > most) return;
      for (const node of level) {
        node.open = true;
        waiting.splice(waiting.indexOf(node), 1);
        waiting.push(...node.children.filter((n) => n.children.length));
      }
      seen += more;
    }
  };

  /** The node that shows each op now: its own, or the outermost closed group around it. */
  pp.representatives = function (tree, count) {
    const found = new Array(count);
    (function walk(node, closed) {
      const shown = closed || (node.op >= 0 || !node.open ? node : null);
      if (node.op >= 0) found[node.op] = shown;
      for (const child of node.children) walk(child, shown);
    })(tree.root, null);
    return found;
  };

  /** The edges of every open group between its children, with ends at its border ("in", "out") for its inputs and outputs.
      Returns Map(container -> [{from, to, producers, cut, skip, bytes}]). */
  pp.visibleEdges = function (tree, graph, plan) {
    const shown = pp.representatives(tree, graph.count), found = new Map();
    const add = (container, from, to, source, target, label) => {
      const edges = found.get(container) || found.set(container, new Map()).get(container);
      const key = `${from === "in" ? "in" : from.id}>${to === "out" ? "out" : to.id}`;
      const edge = edges.get(key) || edges.set(key, { from, to, container, producers: new Set(), crossing: new Map(), cut: false, skip: false, bytes: 0, pairs: 0, label }).get(key);
      edge.pairs++;
      edge.producers.add(source);
      const a = plan.chunk_of[source], b = plan.chunk_of[target];
      if (a !== b) {
        edge.cut = edge.cut || plan.placement[a] !== plan.placement[b];
        edge.skip = edge.skip || b > a + 1;
        edge.crossing.set(`${source}>${b}`, graph.outputBytes(source));
      }
    };
    for (let source = 0; source < graph.count; source++) {
      for (const target of graph.out[source]) {
        let a = shown[source], b = shown[target];
        if (a === b) continue;
        while (a.depth > b.depth) { if (a.parent !== null && !contains(a.parent, b)) add(a.parent, a, "out", source, target, false); a = a.parent; }
        while (b.depth > a.depth) { if (b.parent !== null && !contains(b.parent, a)) add(b.parent, "in", b, source, target, false); b = b.parent; }
        while (a.parent !== b.parent) {
          add(a.parent, a, "out", source, target, false);
          add(b.parent, "in", b, source, target, false);
          a = a.parent;
          b = b.parent;
        }
        if (a !== b) add(a.parent, a, b, source, target, true);
      }
    }
    const result = new Map();
    for (const [container, edges] of found) {
      for (const edge of edges.values()) edge.bytes = [...edge.crossing.values()].reduce((sum, n) => sum + n, 0);
      result.set(container, [...edges.values()]);
    }
    return result;
  };

  function contains(node, other) {
    for (let at = other; at; at = at.parent) if (at === node) return true;
    return false;
  }
})((globalThis.pipepart = globalThis.pipepart || {}));
