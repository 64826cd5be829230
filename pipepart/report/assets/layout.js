// Layered drawing of one group: layers by longest path, order by barycentres, places by least squares without overlap.
(function (pp) {
  "use strict";
  const GAP_X = 22, GAP_Y = 34, THIN = 8;

  /** Nearest places to the wanted ones that keep the order and the distances (isotonic regression). */
  function spread(wanted, distance) {
    const offset = [0];
    for (let n = 1; n < wanted.length; n++) offset.push(offset[n - 1] + distance[n - 1]);
    const blocks = [];
    wanted.forEach((w, n) => {
      let block = { sum: w - offset[n], count: 1 };
      while (blocks.length && blocks[blocks.length - 1].sum / blocks[blocks.length - 1].count >= block.sum / block.count) {
        const before = blocks.pop();
        block = { sum: before.sum + block.sum, count: before.count + block.count };
      }
      blocks.push(block);
    });
    const places = [];
    for (const block of blocks) for (let n = 0; n < block.count; n++) places.push(block.sum / block.count + offset[places.length]);
    return places;
  }

  /** items: [{width, height, rank}] in program order; edges: [[from, to]] with indices, -1 for the group's input and -2 for
      its output. Returns places, routes (lists of points), the size, and where input and output stand. */
  pp.layered = function (items, edges) {
    const hasIn = edges.some(([a]) => a === -1), hasOut = edges.some(([, b]) => b === -2);
    const nodes = items.map((item) => ({ ...item, dummy: false }));
    const IN = hasIn ? nodes.push({ width: THIN, height: 0, dummy: true }) - 1 : -1;
    const OUT = hasOut ? nodes.push({ width: THIN, height: 0, dummy: true }) - 1 : -1;
    const links = edges.map(([a, b]) => [a === -1 ? IN : a, b === -2 ? OUT : b]);
    const order = (n) => (n === IN ? -1 : n === OUT ? Infinity : n);
    const down = links.map(([a, b]) => order(a) < order(b));
    const layer = new Array(nodes.length).fill(hasIn ? 1 : 0);
    if (hasIn) layer[IN] = 0;
    const incoming = nodes.map(() => []), outgoing = nodes.map(() => []);
    links.forEach(([a, b], n) => { if (down[n]) { incoming[b].push(a); outgoing[a].push(b); } });
    for (let n = 0; n < items.length; n++) for (const a of incoming[n]) layer[n] = Math.max(layer[n], layer[a] + 1);
    for (let n = items.length - 1; n >= 0; n--) {
      const needs = incoming[n].filter((a) => a !== IN);
      const users = outgoing[n].filter((b) => b !== OUT);
      if (!needs.length && users.length) layer[n] = Math.max(layer[n], Math.min(...users.map((b) => layer[b])) - 1);
    }
    if (hasOut) layer[OUT] = Math.max(0, ...items.map((_, n) => layer[n])) + 1;
    const depth = Math.max(0, ...layer) + 1, rows = Array.from({ length: depth }, () => []);
    const put = (n) => { nodes[n].layer = layer[n]; rows[layer[n]].push(n); };
    if (hasIn) put(IN);
    items.forEach((_, n) => put(n));
    if (hasOut) put(OUT);

    // one chain of invisible nodes per producer, shared by all its distant users
    const chains = nodes.map(() => []), near = [];
    links.forEach(([a, b], n) => {
      if (!down[n] || layer[b] <= layer[a]) return;
      let from = a;
      for (let l = layer[a] + 1; l < layer[b]; l++) {
        if (chains[a][l] === undefined) {
          chains[a][l] = nodes.push({ width: THIN, height: 0, dummy: true, layer: l }) - 1;
          rows[l].push(chains[a][l]);
          near.push([from, chains[a][l]]);
        }
        from = chains[a][l];
      }
      near.push([from, b]);
    });
    const up = nodes.map(() => []), below = nodes.map(() => []);
    for (const [a, b] of near) { below[a].push(b); up[b].push(a); }

    const position = new Array(nodes.length);
    const number = () => rows.forEach((row) => row.forEach((n, at) => { position[n] = at; }));
    number();
    for (let sweep = 0; sweep < 8; sweep++) {
      const side = sweep % 2 === 0 ? up : below;
      const list = sweep % 2 === 0 ? rows : rows.slice().reverse();
      for (const row of list) {
        if (row.length < 2) continue;
        const key = new Map(row.map((n, at) => [n, side[n].length ? side[n].reduce((sum, m) => sum + position[m], 0) / side[n].length : at]));
        row.sort((a, b) => key.get(a) - key.get(b) || position[a] - position[b]);
        row.forEach((n, at) => { position[n] = at; });
      }
    }
    const x = new Array(nodes.length).fill(0);
    const gaps = rows.map((row) => row.slice(1).map((n, at) => (nodes[row[at]].width + nodes[n].width) / 2 + (nodes[n].dummy && nodes[row[at]].dummy ? 10 : GAP_X)));
    rows.forEach((row, l) => {
      let at = 0;
      row.forEach((n, i) => { x[n] = at; at += gaps[l][i] || 0; });
      const middle = row.length ? (x[row[0]] + x[row[row.length - 1]]) / 2 : 0;
      row.forEach((n) => { x[n] -= middle; });
    });
    const sweeps = nodes.length > 2000 ? 12 : 40;
    for (let sweep = 0; sweep < sweeps; sweep++) {
      // at the end from the top down, each below its producers: chains become straight
      const settle = sweep >= sweeps - 2, both = sweep > 3 && !settle, list = settle || sweep % 2 === 0 ? rows : rows.slice().reverse();
      for (const row of list) {
        const wanted = row.map((n) => {
          let mates = both ? [...up[n], ...below[n]] : settle || sweep % 2 === 0 ? up[n] : below[n];
          if (settle && !nodes[n].dummy && mates.some((m) => !nodes[m].dummy)) mates = mates.filter((m) => !nodes[m].dummy);
          if (!mates.length) return x[n];
          let sum = 0, weight = 0;
          for (const m of mates) { const w = nodes[n].dummy && nodes[m].dummy ? 8 : nodes[n].dummy || nodes[m].dummy ? 0.3 : 2; sum += w * x[m]; weight += w; }
          return sum / weight;
        });
        const l = nodes[row[0]] ? nodes[row[0]].layer : 0;
        spread(wanted, gaps[l]).forEach((place, i) => { x[row[i]] = place; });
      }
    }
    const tops = [], bottoms = [];
    let y = 0;
    rows.forEach((row, l) => {
      tops.push(y);
      y += Math.max(0, ...row.map((n) => nodes[n].height));
      bottoms.push(y);
      if (l < depth - 1) y += GAP_Y;
    });
    const left = nodes.length ? Math.min(...nodes.map((node, n) => x[n] - node.width / 2)) : 0;
    const right = nodes.length ? Math.max(...nodes.map((node, n) => x[n] + node.width / 2)) : 0;
    const place = items.map((item, n) => ({ x: x[n] - item.width / 2 - left, y: tops[layer[n]] }));
    const centre = (n) => x[n] - left;
    const routes = links.map(([a, b], n) => {
      if (!down[n] || layer[b] <= layer[a]) return null;
      const points = [];
      for (let l = layer[a] + 1; l < layer[b]; l++) points.push([centre(chains[a][l]), tops[l], bottoms[l]]);
      return { points, from: [centre(a), tops[layer[a]] + nodes[a].height], to: [centre(b), tops[layer[b]]], clear: bottoms[layer[a]] };
    });
    return { place, routes, width: right - left, height: y, inX: hasIn ? centre(IN) : (right - left) / 2, outX: hasOut ? centre(OUT) : (right - left) / 2 };
  };
})((globalThis.pipepart = globalThis.pipepart || {}));
