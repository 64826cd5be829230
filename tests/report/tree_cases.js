// Builds the page's trees over graphs from standard input; prints what stands where as JSON.
"use strict";
const fs = require("fs");
const vm = require("vm");
const [folder, ...names] = process.argv.slice(2);
for (const name of names) vm.runInThisContext(fs.readFileSync(`${folder}/${name}`, "utf8"), { filename: name });
const pp = globalThis.pipepart;
const cases = JSON.parse(fs.readFileSync(0, "utf8"));
const answers = cases.map(({ payload, mode, open }) => {
  const graph = pp.graphOf(payload.graph), tree = pp.buildTree(graph, payload.plan, mode);
  const plain = (node) => (node.op >= 0 ? node.op : { label: node.label, path: node.path, ops: node.sum.ops, children: node.children.map(plain) });
  (function walk(node, depth) { node.open = depth < open && node.children.length > 0; node.children.forEach((c) => walk(c, depth + 1)); })(tree.root, 0);
  const edges = [...pp.visibleEdges(tree, graph, payload.plan)];
  const layouts = edges.map(([node, list]) => {
    const at = new Map(node.children.map((child, n) => [child, n]));
    const items = node.children.map((_, n) => ({ width: 60 + (n * 37) % 80, height: 30 + (n * 13) % 50 }));
    const drawing = pp.layered(items, list.map((e) => [e.from === "in" ? -1 : at.get(e.from), e.to === "out" ? -2 : at.get(e.to)]));
    return { boxes: drawing.place.map((p, n) => [p.x, p.y, items[n].width, items[n].height]), size: [drawing.width, drawing.height] };
  });
  const between = edges.flatMap(([, list]) => list.filter((e) => e.label).map((e) => ({
    from: e.from.label, to: e.to.label, pairs: e.pairs, cut: e.cut, skip: e.skip, bytes: e.bytes,
  })));
  return { tree: plain(tree.root), between, layouts };
});
process.stdout.write(JSON.stringify(answers));
