"use strict";
// Shows the data of a report. All of its texts become text nodes, never HTML.
// Parts of the data, each optional: facts, runs, table, alarms, groups, metrics, evaluation, trees, example, differences, configuration.

const SECTIONS_OPEN = 2;  // of the charts
const LIGHT = ["#0072b2", "#d55e00", "#008f64", "#b0419a", "#8a6d00", "#3d9bd1", "#5b5b5b", "#a52a2a"];
const DARK = ["#4fa8e0", "#ff8a3c", "#2cc295", "#e08bd0", "#d8b64a", "#9ad4f5", "#b8b8b8", "#e87d7d"];
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3]];
const dark = matchMedia("(prefers-color-scheme: dark)");
const color = k => (dark.matches ? DARK : LIGHT)[k % LIGHT.length];
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const plots = [];

// Makes an element. Children are elements, texts and numbers
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  return put(element, children);
}
function put(element, children) {
  element.append(...children.flat(2).filter(child => child !== null && child !== undefined));
  return element;
}

// Makes a table. On a narrow page, the cells of one with class `stacked` are below each other, each with the heading of its column
function table(rows, kind = "") {
  const [head, ...body] = rows;
  const cell = (x, k) => make("td", {"data-name": head[k], class: String(x).length > 48 ? "long" : null}, String(x));
  return make("div", {class: "scroll"}, make("table", {class: kind},
    make("thead", {}, make("tr", {}, head.map(x => make("th", {}, String(x))))),
    make("tbody", {}, body.map(row => make("tr", {}, row.map(cell))))));
}

// Curves

// Draws one chart into a box, with a legend below that shows the values at the cursor and switches lines on and off
function draw(chart, box, isSmooth, height) {
  const groups = new Set(chart.lines.map(line => line.group)).size;
  const kinds = [...new Set(chart.lines.map(line => line.line))];
  const data = [chart.x], series = [{}], bands = [], owners = [];
  chart.lines.forEach((line, k) => {
    const own = () => color(groups > 1 ? line.group : k);
    const dash = groups > 1 ? DASHES[kinds.indexOf(line.line) % DASHES.length] : [];
    const mean = isSmooth && !line.low ? smoothed(line.mean) : null;
    const isSparse = line.mean.filter(x => x !== null).length <= 30;
    const common = {spanGaps: true, stroke: own, dash, points: {show: isSparse, size: 5, fill: own}};
    const first = data.length;
    if (line.low) {
      const fill = () => own() + "33";
      data.push(line.high, line.low);
      series.push({...common, width: 0, points: {show: false}}, {...common, width: 0, points: {show: false}});
      bands.push({series: [first, first + 1], fill});
    }
    if (mean) {
      data.push(line.mean);
      series.push({...common, stroke: () => own() + "55", width: 1, points: {show: false}});
    }
    data.push(mean || line.mean);
    series.push({...common, width: 2});
    owners.push({first, last: data.length - 1, own, dash, line});
  });
  const legend = make("div", {class: "legend"}), at = make("span", {class: "dim"});
  const values = owners.map(owner => {
    const value = make("span", {class: "value"});
    const swatch = make("span", {class: "swatch"});
    const button = make("button", {type: "button", title: "Show or hide this line"}, swatch, owner.line.label, value);
    const paint = () => {
      swatch.style.borderColor = owner.own();
      swatch.style.borderTopStyle = owner.dash.length ? "dashed" : "solid";
    };
    button.addEventListener("click", () => {
      const isOff = button.classList.toggle("off");
      for (let k = owner.first; k <= owner.last; k++) plot.setSeries(k, {show: !isOff});
    });
    paint();
    dark.addEventListener("change", paint);
    legend.append(button);
    return value;
  });
  legend.append(at);
  const showValues = index => {
    owners.forEach(({line}, k) => {
      let place = index ?? line.mean.length - 1;
      while (index === null && place > 0 && line.mean[place] === null) place--;
      const spread = line.high && line.mean[place] !== null ? ` [${show(line.low[place])}, ${show(line.high[place])}]` : "";
      values[k].textContent = show(line.mean[place]) + spread;
    });
    at.textContent = index === null ? "at the end" : `at step ${chart.x[index]}`;
  };
  const axis = {stroke: () => css("--dim"), grid: {stroke: () => css("--line"), width: .5}, ticks: {show: false}, font: "12px system-ui"};
  const number = (_, ticks) => ticks.map(x => Math.abs(x) >= 1e5 || (x !== 0 && Math.abs(x) < 1e-3) ? x.toExponential(0) : String(+x.toPrecision(6)));
  const plot = new uPlot({
    width: Math.max(200, box.clientWidth), height, legend: {show: false},
    scales: {x: {time: false, range: (_, low, high) => [low === chart.x[0] ? Math.min(1, low) : low, high]}},  // from the first step, which may have no entry
    cursor: {sync: {key: "steps"}, y: false, points: {size: 7}},
    axes: [{...axis, size: 28, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6], values: number}, {...axis, size: 58, values: number}],
    series, bands, padding: [8, 14, 0, 0], hooks: {setCursor: [u => showValues(u.cursor.idx ?? null)]},
  }, data, box);
  showValues(null);
  box.after(legend);
  new ResizeObserver(() => plot.setSize({width: Math.max(200, box.clientWidth), height})).observe(box);
  plots.push(plot);
  return () => { plots.splice(plots.indexOf(plot), 1); plot.destroy(); legend.remove(); };
}

// A chart is drawn when its section is open, also below what is in view, so that a picture of the whole page has it
function chartBox(chart, smooth, height = 200) {
  const box = make("div", {class: "plot", style: `height: ${height}px`});
  let undo = null;
  const redraw = () => { undo?.(); undo = draw(chart, box, smooth.checked, height); };
  smooth.addEventListener("change", () => undo && redraw());
  new IntersectionObserver(entries => {
    if (!undo && entries.some(entry => entry.isIntersecting)) redraw();
  }, {rootMargin: "100000px"}).observe(box);
  addEventListener("beforeprint", () => undo || redraw());
  return make("div", {class: "chart"}, make("h3", {title: chart.also.length ? `= ${chart.also.join(" = ")}` : null}, chart.title), box);
}

function curves(charts) {
  const smooth = make("input", {type: "checkbox", checked: true});
  const names = [...new Set(charts.map(chart => chart.section))];
  const isLong = charts.some(chart => chart.lines.some(line => line.mean.length >= SMOOTHED_FROM && !line.low));
  const hint = "Against the optimizer step. Drag to zoom, double-click to go back, click a name to hide its line.";
  return [
    make("div", {class: "bar small dim"}, hint, isLong ? make("label", {}, smooth, "smooth (mean of the neighbouring entries)") : null),
    names.map((name, k) => make("details", k < SECTIONS_OPEN ? {open: true} : {}, make("summary", {}, name),
      make("div", {class: "charts"}, charts.filter(chart => chart.section === name).map(chart => chartBox(chart, smooth))))),
  ].flat();
}

// Evaluations

// Draws an interval and its mean on a line from low to high
function interval(estimate, low, high) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const add = (tag, attributes) => {
    const element = document.createElementNS(svg.namespaceURI, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    svg.append(element);
  };
  const x = value => 6 + 138 * (value - low) / (high - low || 1);
  svg.setAttribute("class", "forest");
  svg.setAttribute("viewBox", "0 0 150 14");
  add("line", {x1: 6, x2: 144, y1: 13, y2: 13, stroke: "var(--line)"});
  if (low < 0 && high > 0) add("line", {x1: x(0), x2: x(0), y1: 0, y2: 14, stroke: "var(--dim)", "stroke-dasharray": "2 2"});
  if (estimate.low !== null) add("line", {x1: x(estimate.low), x2: x(estimate.high), y1: 7, y2: 7, stroke: "var(--accent)", "stroke-width": 3});
  add("circle", {cx: x(estimate.mean), cy: 7, r: 4, fill: "var(--accent)"});
  return svg;
}

function estimates(part) {
  const format = (x, column) => column.rate ? `${(100 * x).toFixed(1)}%` : show(x);
  const ends = part.columns.map((_, k) => {
    const found = part.rows.map(row => row.cells[k]).filter(x => x);
    const all = found.flatMap(x => [x.mean, x.low, x.high]).filter(x => x !== null);
    return [Math.min(0, ...all), part.columns[k].rate && part.columns[k].whole ? 1 : Math.max(0, ...all)];
  });
  const cell = (estimate, k) => {
    const column = part.columns[k], named = {"data-name": column.name};
    if (!estimate || estimate.mean === null) return make("td", named, "–");
    const brackets = (low, high) => ` [${format(low, column)}, ${format(high, column)}]`;
    const hasStudent = part.isDifference && (estimate.t_low ?? null) !== null && estimate.t_low !== estimate.low;
    const range = (estimate.low ?? null) === null ? "" : brackets(estimate.low, estimate.high) + (hasStudent ? `, t${brackets(estimate.t_low, estimate.t_high)}` : "");
    const text = [make("b", {}, format(estimate.mean, column)), make("span", {class: "dim small range"}, range)];
    return make("td", named, text, estimate.low === undefined || part.plain ? null : interval(estimate, ...ends[k]));
  };
  const [box, title] = part.plain ? ["details", "summary"] : ["div", "h3"];
  return make(box, {}, part.title ? make(title, {}, part.title) : null, make("div", {class: "scroll"}, make("table", {class: "stacked"},
    make("thead", {}, make("tr", {}, make("th", {}, ""), part.columns.map(column => make("th", {}, column.name)))),
    make("tbody", {}, part.rows.map(row => make("tr", {}, make("td", {}, row.name), row.cells.map(cell)))))),
    part.note ? make("p", {class: "dim small"}, part.note) : null);
}

function matrix(part) {
  const all = part.values.flat(), low = Math.min(...all, 0), high = Math.max(...all);
  const heat = value => {
    const share = Math.round(70 * (value - low) / (high - low || 1));
    return `background: color-mix(in srgb, var(--high) ${share}%, var(--back))`;
  };
  return make("div", {}, make("h3", {}, part.title), make("div", {class: "scroll"}, make("table", {},
    make("thead", {}, make("tr", {}, make("th", {}, `${part.row} \\ ${part.column}`), part.names.map(name => make("th", {}, name)))),
    make("tbody", {}, part.values.map((row, k) => make("tr", {}, make("th", {}, part.names[k]),
      row.map(value => { const td = make("td", {class: "heat"}, value === null ? "–" : value.toFixed(3)); td.style.cssText = heat(value); return td; })))))));
}

// Returns the tables of an evaluation's JSON file
function evaluationTables({settings, policies, over_teams: overTeams, ...contents}) {
  const isRate = name => name.startsWith("pass@") || name === "passed_hidden";
  const rows = Object.fromEntries(Object.entries(policies).map(([name, policy]) => [name, policy.results.final]));
  if (overTeams) rows["all teams"] = overTeams.final;
  const main = Object.keys(Object.values(rows)[0]).filter(name => name === "return" || isRate(name));
  const part = (title, rows, note = "") => {
    const names = main.filter(name => Object.values(rows).some(row => name in row));
    const columns = names.map(name => ({name, rate: isRate(name), whole: isRate(name) && !title}));
    return {title, note, columns, rows: Object.entries(rows).map(([name, row]) => ({name, cells: names.map(x => row[x])}))};
  };
  const differences = {differences: "The team minus the baseline", control: "The team minus a model trained at its cost", contributions: "The team minus the team without a part"};
  const costs = {"calls": p => p.cost_per_episode.calls, "generated tokens": p => p.cost_per_episode.generated_tokens,
    "tokens waited for": p => p.cost_per_episode.waited_tokens, "wall seconds": p => p.cost_per_episode.wall_seconds,
    "latency, s": p => p.speed?.latency, "tokens per second": p => p.speed?.tokens_per_second};
  const cost = Object.entries(policies).map(([name, policy]) => ({name, cells: Object.values(costs).map(of => of(policy) === undefined ? null : {mean: of(policy)})}));
  const byTurn = ([name, {results: {final, ...turns}}]) => ({
    title: `${name}, by turn`, plain: true, columns: Object.keys(turns).map(turn => ({name: turn.replace("_", " ")})),
    rows: [...new Set(Object.values(turns).flatMap(Object.keys))].map(x => ({name: x, cells: Object.values(turns).map(turn => turn[x])})),
  });
  const {runs, ...metrics} = contents.cross_play || {};
  const matrices = Object.entries(metrics).flatMap(([metric, found]) => Object.entries(found.matrices).map(([role, values]) => ({
    title: `${metric}: ${show(found.diagonal.mean)} as trained (diagonal), ${show(found.off_diagonal.mean)} mixed`, names: runs, values, row: `run of ${role}`, column: "run of the others",
  })));
  const confidence = `${100 * settings.confidence}%`, isWhole = ({results}) => Object.values(results).every(turn => !(turn.reward_none?.mean > 0));
  const leftOut = Object.values(policies).every(isWhole) ? "" : " Episodes without a reward are left out of the means; reward_none is their share.";
  return [
    make("p", {}, `${contents.items} items, ${settings.num_episodes} sampled episode${settings.num_episodes === 1 ? "" : "s"} each.${leftOut} ${contents.environment ? `Task: ${contents.environment}` : ""}`),
    estimates(part("", rows, `Lines are ${confidence} intervals over items; those of all teams over items and teams. ${contents.range_note || ""}`)),
    ...Object.keys(differences).filter(key => contents[key]).map(key => estimates({isDifference: true, ...part(differences[key],
      Object.fromEntries(Object.entries(contents[key]).map(([name, numbers]) => [name, numbers.final])), contents.difference_note)})),
    ...matrices.map(matrix),
    estimates({title: "Cost and latency of an episode", columns: Object.keys(costs).map(name => ({name})), rows: cost}),
    ...Object.entries(policies).filter(([, policy]) => policy.kind !== "pair").map(byTurn).map(estimates),
    make("details", {}, make("summary", {}, "Settings"), table([["setting", "value"], ...Object.entries({...contents.dataset, ...settings}).filter(([, x]) => x !== null).map(([name, x]) => [name, text(x)])])),
  ];
}

// The best, a typical and the worst answer of each turn
function answersOf(policies) {
  const side = ({name, value, prompts, completions}, k) => make("div", {class: "card"}, make("h3", {}, `${["Best", "Typical", "Worst"][k]}: ${show(value)}`, make("span", {class: "dim small"}, ` ${name}`)),
    make("div", {class: "answers"}, Object.entries(completions).map(([role, text]) => make("div", {}, make("h4", {}, role), code(text)))),
    make("details", {}, make("summary", {class: "small"}, "Prompts"), Object.entries(prompts).map(([role, prompt]) => make("div", {}, make("h4", {}, role), code(typeof prompt === "string" ? prompt : prompt.map(x => `[${x.role}] ${x.content}`).join("\n\n"))))));
  return [make("p", {class: "dim small"}, "The best, a typical and the worst answer of each turn, with what the episode earned from this turn on."),
    ...Object.entries(policies).filter(([, policy]) => policy.kind !== "pair").map(([name, {answers = []}], k) => make("details", {open: k === 0}, make("summary", {}, name),
      answers.map((sides, turn) => [answers.length > 1 ? make("h3", {}, `Turn ${turn + 1}`) : null, make("div", {class: "sides three"}, sides.map(side))])))];
}

// The page

// What the team answered to one item at its first and its last tree
function learnt({trees, columns, texts}) {
  const [first, last] = trees.map(rows => treeOf(rows, columns)), text = number => texts[number] ?? "";
  const answers = tree => middling(tree).map(({node, texts}) => Object.entries(node.prompts).filter(([, prompt]) => prompt !== null)
    .map(([role]) => make("div", {}, make("h4", {}, role, make("span", {class: "dim small"}, node.turn > 1 ? ` turn ${node.turn}` : "")), code(text(texts[role])))));
  const side = tree => make("div", {class: "card"}, make("h3", {}, `Step ${tree.step}: return ${show(middling(tree)[0].return)}`), make("div", {class: "answers"}, answers(tree)));
  const asked = tree => Object.entries(tree.nodes[0].prompts).filter(([, prompt]) => prompt !== null).map(([role, prompt]) => make("div", {}, make("h4", {}, role), code(text(prompt))));
  const isSame = first.item === last.item;
  return make("div", {class: "example"}, make("p", {class: "dim small"}, isSame ? `A typical joint answer to item ${first.name}, before and after:` : "A typical joint answer, before and after. No item of the trees was seen twice:"),
    make("div", {class: "sides"}, side(first), side(last)),
    make("details", {open: texts.every(text => text.length < 400)}, make("summary", {class: "small"}, "Prompts"), make("div", {class: "answers"}, asked(first), isSame ? null : asked(last))));
}

function summaryOf(data) {
  const {facts, runs, groups} = data;
  if (runs) return groups.map(group => [group, runs.filter(run => run.group === group).map(run => run.folder).join(", ")]);
  const total = name => facts[name] && show(Math.round(facts[name]));
  return facts ? [
    ["Step", stepOf(facts)], ["Agents", Object.entries(facts.agents).map(([role, name]) => name ? `${role}: ${name}` : role).join(", ")],
    ["Task", facts.task], ["Data", facts.dataset], ["Started", facts.started.slice(0, 16).replace("T", " ")],
    ["Training time", facts.train_runtime && `${show(Math.round(facts.train_runtime))} s`], [facts.algorithm === "MADPO" ? "Env steps" : "Scored joint actions", total("env_step")], ["Tokens", total("num_tokens")], ["Machine", facts.machine],
  ].filter(([, value]) => value) : [];
}
const stepOf = run => `${run.step} of ${run.max_steps}, ${run.finished ? "finished" : "not finished"}`;
const text = value => value !== null && typeof value === "object" ? JSON.stringify(value) : String(value);

function detailsOf({facts, runs, differences, configuration}, constant) {
  const entries = (name, values) => table([[name, "value"], ...Object.entries(values).map(([key, value]) => [key, text(value)])]);
  const details = [];
  if (runs) details.push(["Runs", table([["run", "group", "seed", "step", "folder"], ...runs.map(run => [run.name, run.group, run.seed, stepOf(run), run.folder])])]);
  if (differences && Object.keys(Object.values(differences)[0]).length) {
    const names = Object.keys(Object.values(differences)[0]);
    details.push(["Differences", table([["setting", ...Object.keys(differences)], ...names.map(name => [name, ...Object.values(differences).map(of => of[name])])])]);
  }
  if (facts) details.push(["Settings that are not the default", entries("setting", facts.settings)], ["Versions", entries("package", facts.versions)]);
  if (constant.length) details.push(["Metrics that never changed", table([["metric", "value"], ...constant])]);
  if (configuration) details.push(["Configuration", make("pre", {}, configuration)]);
  if (facts) {
    const packages = Object.entries(facts.versions).filter(([name]) => name !== "python").map(([name, version]) => `${name}==${version}`);
    details.push(["Reproduce", make("pre", {}, `pip install ${packages.join(" ")}\n${facts.command}`)]);
  }
  return details.map(([title, body]) => make("details", {}, make("summary", {}, title), body));
}

function page(data) {
  document.querySelector("h1").textContent = data.title;
  const body = document.querySelector("main"), nav = document.querySelector("nav");
  // `contents` makes what is in a section. If it fails, the other sections are shown all the same
  const section = (title, contents) => {
    const id = title.toLowerCase(), element = make("section", {id}, make("h2", {}, title));
    nav.append(make("a", {href: `#${id}`}, title));
    body.append(element);
    try {
      put(element, [contents(element)]);
    } catch (error) {
      console.error(error);
      element.append(make("div", {class: "alarm"}, `This section cannot be shown: ${error.message}`));
    }
  };
  const [charts, constant] = data.metrics ? chartsOf(data.metrics, data.groups) : [[], []];
  const note = "A line is the mean of the runs of a group, its band reaches from the lowest to the highest of them. Differences have Welch's 95% intervals over runs where both groups have several.";
  // A return that never changes, as in a zero-sum game, has no chart
  const main = mainChart(charts), hasExample = Boolean(data.example?.trees.length), smooth = {checked: true, addEventListener() {}};
  const first = main || hasExample ? [...new Set([main, ownChart(charts)])].filter(chart => chart) : [];
  if (main || hasExample) section("Learning", () => [hasExample ? learnt(data.example) : null, make("div", {class: "learning"}, first.map(chart => chartBox(chart, smooth, 300)))]);
  if (data.table) section("Summary", () => [
    make("dl", {class: "facts"}, summaryOf(data).flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)])),
    data.alarms.map(alarm => make("div", {class: "alarm"}, `${alarm.run ? `${alarm.run}, s` : "S"}tep ${alarm.step}: ${alarm.message}`)),
    data.table.length > 1 ? table(data.table, data.runs && "stacked") : null, data.runs ? make("p", {class: "dim small"}, note) : null]);
  if (data.evaluation) {
    section("Evaluation", () => evaluationTables(data.evaluation));
    section("Answers", () => answersOf(data.evaluation.policies));
  }
  if (charts.length) section("Curves", () => curves(charts.filter(chart => !first.includes(chart))));
  if (data.trees && data.trees.trees.length) section("Rollouts", element => showTrees(data.trees, element));
  const details = detailsOf(data, constant);
  if (details.length) section("Details", () => details);
}

page(JSON.parse(document.getElementById("data").textContent));
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(details => { details.open = true; }));
dark.addEventListener("change", () => plots.forEach(plot => plot.redraw()));
