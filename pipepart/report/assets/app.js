// Start: read the data, choose the theme, draw the sections.
(function (pp) {
  "use strict";
  if (typeof document === "undefined") return;
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);

  function theme(name) {
    document.documentElement.dataset.theme = name;
    $("theme").textContent = name === "dark" ? "light" : "dark";
  }
  let wanted = null;
  try { wanted = localStorage.getItem("pipepart-theme"); } catch { /* files may have no storage */ }
  theme(wanted || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
  $("theme").addEventListener("click", () => {
    const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    theme(next);
    try { localStorage.setItem("pipepart-theme", next); } catch { /* the choice lasts as long as the page */ }
  });

  $("title").textContent = data.title;
  $("subtitle").textContent = `plan ${data.plan.hash}`;
  $("footer").textContent = `Made by pipepart. Plan ${data.plan.hash}, graph ${data.plan.graph_hash || "unknown"}; ` +
    `${data.graph.columns.name.length} ops, ${data.plan.timeline.columns.stage.length} predicted events.`;

  const timelines = [{ label: data.compare ? "A predicted" : "predicted", timeline: pp.unpackTimeline(data.plan.timeline) }];
  if (data.measured) timelines.push({ label: data.compare ? "A measured" : "measured", timeline: pp.unpackTimeline(data.measured) });
  if (data.compare) timelines.push({ label: "B predicted", timeline: pp.unpackTimeline(data.compare.timeline) });
  pp.data = data;
  pp.timelines = timelines;

  // the overview first; the browser may paint it before the larger sections are drawn
  pp.renderOverview($("overview"), data);
  pp.renderCompare($("compare"), data);
  pp.renderStages($("stages"), data, timelines);
  for (const section of document.querySelectorAll("main section")) {
    if (!section.hidden) $("nav").append(pp.h("a", { href: `#${section.id}` }, section.dataset.title));
  }
  const rest = [
    () => pp.renderSchedule($("schedule"), timelines),
    () => pp.renderWhatIf($("whatif"), data),
    () => pp.renderGraph($("graph"), data),
    () => {
      document.documentElement.dataset.ready = "yes";
      performance.mark("complete");
      if (location.hash.length > 1 && $(location.hash.slice(1))) $(location.hash.slice(1)).scrollIntoView();
    },
  ];
  const next = () => {
    rest.shift()();
    if (rest.length) setTimeout(next, 0);
  };
  requestAnimationFrame(() => {
    performance.mark("overview");
    setTimeout(next, 0);
  });
})((globalThis.pipepart = globalThis.pipepart || {}));
