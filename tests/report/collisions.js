// In the page: texts of the charts that touch each other or leave the picture, boxes of the graph that overlap,
// and anything outside the window. Returns a list of sentences, empty if all is well.
() => {
  const found = [], hit = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 2.5;
  for (const svg of document.querySelectorAll("svg.gantt")) {
    const frame = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll("text")].map((t) => [t.textContent, t.getBoundingClientRect()]);
    texts.forEach(([text, box], n) => {
      if (box.left < frame.left - 1 || box.right > frame.right + 1) found.push(`gantt: ${text} leaves the picture`);
      for (let m = n + 1; m < texts.length; m++)
        if (hit(box, texts[m][1])) found.push(`gantt: ${text} / ${texts[m][0]}`);
    });
  }
  const nodes = [...document.querySelectorAll("#graph .node")];
  const tags = [...document.querySelectorAll("#graph .bytes rect")].map((r) => r.getBoundingClientRect());
  const words = [];
  for (const node of nodes) {
    const box = node.querySelector(".box").getBoundingClientRect();
    const mine = [...node.querySelectorAll(":scope > text, :scope > .opener text")];
    for (const text of mine) {
      const t = text.getBoundingClientRect();
      words.push([text.textContent, t]);
      if (t.left < box.left - 1 || t.right > box.right + 1) found.push(`graph: ${text.textContent} leaves its box`);
    }
  }
  words.forEach(([text, box], n) => {
    for (let m = n + 1; m < words.length; m++) if (hit(box, words[m][1])) found.push(`graph: ${text} / ${words[m][0]}`);
    for (const tag of tags) if (hit(box, tag)) found.push(`graph: bytes over ${text}`);
  });
  tags.forEach((a, n) => tags.slice(n + 1).forEach((b) => { if (hit(a, b)) found.push("graph: bytes over bytes"); }));
  const closed = nodes.filter((n) => !n.classList.contains("open")).map((n) => n.querySelector(".box").getBoundingClientRect());
  closed.forEach((a, n) => closed.slice(n + 1).forEach((b) => { if (hit(a, b)) found.push("graph: box over box"); }));
  for (const element of document.querySelectorAll("main button, main th, main td, main .kpi b, main .figure, main .label, main .chunk b")) {
    if (element.closest(".scroll")) continue;
    const box = element.getBoundingClientRect();
    if (box.width && (box.right > innerWidth + 1 || box.left < -1)) found.push(`outside: ${element.textContent}`);
  }
  if (document.documentElement.scrollWidth > innerWidth) found.push("the page is wider than the window");
  return found;
}
