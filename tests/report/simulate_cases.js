// Runs the page's simulator over cases from standard input; prints what it finds as JSON.
"use strict";
const fs = require("fs");
const vm = require("vm");
const [folder, ...names] = process.argv.slice(2);
for (const name of names) vm.runInThisContext(fs.readFileSync(`${folder}/${name}`, "utf8"), { filename: name });
const pp = globalThis.pipepart;
const cases = JSON.parse(fs.readFileSync(0, "utf8"));
const answers = cases.map(({ schedule, options, costs, edges }) => {
  const filled = pp.fillCosts(costs);
  const made = pp.makeSchedule(schedule, { ...options, costs: filled });
  const timeline = pp.simulate(made, filled, edges);
  return {
    placement: made.placement,
    actions: made.actions.map((list) => list.map((a) => `${a.kind}${a.chunk}.${a.k}`)),
    events: timeline.events.map((e) => [e.stage, pp.actionName(e), e.start, e.end]),
    step: timeline.stepTime,
    bubble: timeline.bubble,
    peaks: pp.peaks(timeline),
    critical: pp.criticalPath(timeline).map((e) => [e.start, e.end]),
    shares: pp.stageShares(timeline).map((s) => Object.values(s).reduce((a, b) => a + b, 0)),
    flows: pp.flows(timeline).length,
    receives: pp.impliedReceives(timeline).map((e) => [e.stage, pp.actionName(e), e.start, e.end]),
  };
});
process.stdout.write(JSON.stringify(answers));
