"use strict";
// What the page of a report computes without a browser: where metrics are drawn, rollout trees, the colours of Python.

// Sections of the charts, with those that belong there. Those of a role belong to the agents, and others, also of a reward's `log_metric`, are parts of the reward
const SECTIONS = {
  "Reward": /^(reward|return|reward_mean|expected_return|final_turn\/reward|rewards\/.*)$/,
  "Solved": /^(passed|passed_hidden|test_pass_rate|tests_passed|.*accurac(y|ies))$/,
  "Episodes": /(?!)/, "Parts of the reward": /(?!)/, "Agents": /(?!)/,
  "Training": /^((.*_)?loss|lr|learning_rate|grad_norm|epoch|beta|entropy|kl|.*_(std|accuracy)|log(it|p)s\/.*)$/,
  "Time and tokens": /^(seconds of a step|step_time|env_step|.*tokens)$/,
  "Scoring and sandbox": /^reward\/.*$/,
};
const OF_QUALITY = ["Reward", "Solved", "Parts of the reward"];
const SMOOTHED_FROM = 20;  // points of a line
const PER_ROW = 8;  // squares of a node with which a branch ends

function show(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (value === 0) return "0";  // also -0
  const size = Math.abs(value);
  if (Number.isInteger(value) || (size >= 1e3 && size < 1e9)) return Math.round(value).toLocaleString("en");
  return size >= 1e9 || size < 0.001 ? value.toPrecision(3) : String(+value.toPrecision(4));
}

// Curves

function smoothed(values) {
  const reach = values.length < SMOOTHED_FROM ? 0 : Math.max(1, Math.round(values.length / 20));
  if (reach === 0) return null;
  return values.map((value, k) => {
    if (value === null) return null;
    const near = values.slice(Math.max(0, k - reach), k + reach + 1).filter(x => x !== null);
    return near.reduce((sum, x) => sum + x, 0) / near.length;
  });
}

// Returns section, chart and line of a metric: `turn_2/passed` is the line `turn 2` of the chart `passed`
function placeOf(name, names) {
  let rest = name, line = [], section = "Parts of the reward";
  if (name.startsWith("eval_")) {
    // The sets of an evaluation have names of their own: the metric is the longest ending that the training has, too
    const endings = names.filter(x => !x.startsWith("eval_") && name.endsWith(`_${x}`)).sort((a, b) => b.length - a.length);
    rest = endings[0] || name.slice(5);
    line = [`evaluation ${name.slice(5, name.length - rest.length).replace(/_$/, "")}`.trim()];
  }
  const match = rest.match(/^(?:turn_(\d+)|(agents|critics)\/([^/]+)|(time))\/(.+)$/), ofEpisode = rest.match(/^episode\/(.+)$/);
  if (ofEpisode) return {section: "Episodes", title: ofEpisode[1].replaceAll("_", " "), line: line.join(", ") || "training"};
  if (match) {
    const [, turn, kind, role, time, end] = match;
    if (!turn) section = "Agents";
    line.unshift(turn ? `turn ${turn}` : role || end);
    rest = time ? "seconds of a step" : kind === "critics" ? `critic: ${end}` : end;
    if (role) return {section, title: rest.replaceAll("_", " "), line: line.join(", ")};
  }
  section = Object.keys(SECTIONS).find(title => SECTIONS[title].test(rest)) || section;
  return {section, title: rest.replaceAll("_", " "), line: line.join(", ") || "training"};
}

// Returns the charts, all of whose lines have the same steps, and the metrics that never change
function chartsOf(metrics, groups) {
  const charts = new Map(), constant = [], names = Object.keys(metrics), seen = new Map();
  const isMain = name => /^(eval_([^/]*_)?)?return$/.test(name);
  for (const [name, curves] of Object.entries(metrics).sort(([a], [b]) => isMain(b) - isMain(a))) {
    const values = curves.flatMap(curve => curve.mean || []);
    if (values.length > 1 && values.every(x => x === values[0])) { constant.push([name, show(values[0])]); continue; }
    const {section, title, line} = placeOf(name, names), key = `${section} ${title}`;
    // Without turns, the return is the reward, and that of the last turn: equal curves are one
    const shape = JSON.stringify(curves, (_, x) => typeof x === "number" ? +x.toPrecision(4) : x), isQuality = OF_QUALITY.includes(section);
    const same = isQuality && seen.get(shape);
    if (same && same.title !== title) { same.also = [...new Set([...same.also, title])]; continue; }
    if (!charts.has(key)) charts.set(key, {section, title, also: [], curves: []});
    if (isQuality && !same) seen.set(shape, charts.get(key));
    curves.forEach((curve, group) => {
      const label = groups.length === 1 ? line : line === "training" ? groups[group] : `${groups[group]}: ${line}`;
      if (curve.step && curve.step.length) charts.get(key).curves.push({label, group, line, curve});
    });
  }
  for (const chart of charts.values()) {
    chart.x = [...new Set(chart.curves.flatMap(({curve}) => curve.step))].sort((a, b) => a - b);
    chart.lines = chart.curves.map(({curve, ...line}) => {
      const places = new Map(curve.step.map((step, k) => [step, k]));
      const column = name => curve[name] && chart.x.map(step => places.has(step) ? curve[name][places.get(step)] : null);
      return {...line, mean: column("mean"), low: column("low"), high: column("high")};
    });
  }
  const order = Object.keys(SECTIONS);
  return [[...charts.values()].sort((a, b) => order.indexOf(a.section) - order.indexOf(b.section)), constant];
}

// Returns the chart that answers whether the team has learnt
const mainChart = charts => ["return", "rewards/accuracies", "accuracy"].map(title => charts.find(chart => chart.title === title)).find(chart => chart);
// Returns the chart of the task's own number, rather over whole episodes than by turn
const OF_EVERY_TASK = /^(length|out of turns|early terminated|reward none|rewards\/.*)$/;
function ownChart(charts) {
  const of = section => charts.filter(chart => chart.section === section && !OF_EVERY_TASK.test(chart.title)), episodes = of("Episodes");
  const solved = episodes.filter(chart => SECTIONS.Solved.test(chart.title.replaceAll(" ", "_")));
  return [...solved, ...episodes, ...of("Solved"), ...of("Parts of the reward")][0];
}

// Python

const KEYWORDS = new Set(("and as assert async await break class continue def del elif else except False finally for from global if import in is lambda " +
  "None nonlocal not or pass raise return True try while with yield").split(" "));
const LOOKS_LIKE_CODE = /^[ \t]*(def |class |import |from \w+ import|return |@\w|for .*:|if .*:|assert )/m;
// Comments, strings, numbers and names. Each is read once and whole, so that a long text takes no more than its length
const TOKEN = new RegExp([
  /(#[^\n]*)/, /("""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?)/, /(\d[\w.]*)/, /[A-Za-z_]\w*/,
].map(part => part.source).join("|"), "g");

// Returns the pieces of a text, each with its class, which is empty where nothing is coloured
function coloured(text) {
  const pieces = [];
  let end = 0;
  for (const {0: token, 1: comment, 2: string, 3: number, index} of LOOKS_LIKE_CODE.test(text) ? text.matchAll(TOKEN) : []) {
    const after = index + token.length, name = KEYWORDS.has(token) ? "k" : text[after] === "(" ? "f" : "";
    const kind = comment ? "c" : string ? "s" : number ? "n" : name;
    if (kind) { pieces.push(["", text.slice(end, index)], [kind, token]); end = after; }
  }
  return [...pieces, ["", text.slice(end)]].filter(([, piece]) => piece);
}

// Rollout trees

// Makes a tree of the rows of a trace: nodes with their joint actions
function treeOf(rows, columns) {
  const tree = {byKey: new Map()}, kinds = new Map();
  columns.forEach((name, k) => {
    const [kind, ...rest] = name.split("/");
    if (rest.length) kinds.set(kind, [...kinds.get(kind) || [], [rest.join("/"), k]]);
  });
  for (const cells of rows) {
    const row = Object.fromEntries(columns.map((name, k) => [name, cells[k]]));
    // A role may have the name of what every object inherits, such as "constructor"
    const of = kind => Object.assign(Object.create(null), Object.fromEntries((kinds.get(kind) || []).map(([name, k]) => [name, cells[k]])));
    const prefix = row.episode === null || row.episode === undefined ? "" : `e${row.episode}`, key = prefix + row.node;
    Object.assign(tree, {id: [row.split, row.step, row.process, row.tree].join("-"), step: row.step, split: row.split, item: String(row.item), name: String(row.name ?? row.item)});
    if (!tree.byKey.has(key)) tree.byKey.set(key, {tree, key, prefix, path: row.node, parent: row.parent, turn: row.turn, prompts: of("prompt"), actions: []});
    const node = tree.byKey.get(key);
    node.actions.push({node, action: row.action, texts: of("completion"), reward: row.reward, return: row.return, rewards: of("reward"), returns: of("return"),
      advantages: of("advantage"), metrics: of("metrics"), extra: of("extra")});
  }
  tree.nodes = [...tree.byKey.values()];
  tree.actions = tree.nodes.flatMap(node => node.actions);
  // Where turns earn at the end, the rewards before say nothing
  const last = Math.max(...tree.nodes.map(node => node.turn)), early = known(tree.actions.filter(action => action.node.turn < last), "reward");
  tree.shown = early.length && early.every(reward => reward === early[0]) ? "return" : "reward";
  [tree.low, tree.high] = ends(known(tree.actions, tree.shown));
  const returns = known(tree.actions.filter(action => action.node.parent === ""), "return");
  tree.value = returns.length ? returns.reduce((sum, x) => sum + x, 0) / returns.length : null;
  return tree;
}

// With `reward_none: drop`, a joint action that nothing scores has neither a reward nor a return
const known = (actions, name) => actions.map(action => action[name]).filter(x => x !== null);
const ends = values => values.length ? values.reduce(([low, high], x) => [Math.min(low, x), Math.max(high, x)], [Infinity, -Infinity]) : [null, null];

// Returns the lowest and the highest of a run's rewards and returns, so that a colour has one meaning in all of its trees
function scalesOf(trees) {
  const actions = trees.flatMap(tree => tree.actions);
  return {reward: ends(known(actions, "reward")), return: ends(known(actions, "return"))};
}

// Returns the tree whose joint actions differ most in what is shown, the latest of equals
const widest = trees => trees.reduce((a, b) => b.high - b.low >= a.high - a.low ? b : a);

// Groups the joint actions of a node by their answers and rewards
const alike = node => [...Map.groupBy(node.actions, one => JSON.stringify([one.texts, one.reward, one.rewards])).values()];

const child = ({node, action}) => node.tree.byKey.get(`${node.prefix}${node.path.replace(/\/$/, "")}/${action}`);
const parentOf = node => node.parent === "" ? null : node.tree.byKey.get(node.prefix + node.parent);
const actionBefore = node => parentOf(node)?.actions.find(action => child(action) === node);
const isSuspicious = action => Boolean(action.extra.suspicious) || action.metrics.suspicious > 0;

// Returns a joint action of middling return with which an item begins, and those that follow it
function middling(tree) {
  const middle = actions => {
    const scored = actions.filter(action => action.return !== null), ranked = (scored.length ? scored : actions).toSorted((a, b) => a.return - b.return);
    return ranked[Math.floor(ranked.length / 2)];
  };
  const way = [middle(tree.actions.filter(action => action.node.parent === ""))];
  while (child(way.at(-1))) way.push(middle(child(way.at(-1)).actions));
  return way;
}

// Returns whether a joint action fits a filter, whose values are texts as typed and `suspicious`
const fits = ({reward, node, ...action}, {low, high, turn, item, suspicious}) =>
  (low === "" || reward !== null && reward >= +low) && (high === "" || reward !== null && reward <= +high) && (turn === "" || node.turn === +turn) &&
  (!suspicious || isSuspicious(action)) && `${node.tree.name} ${node.tree.item}`.toLowerCase().includes(item.toLowerCase());

// Gives nodes and joint actions their places in a drawing: a column per turn, the nodes of a branch side by side
function place(tree) {
  const size = tree.nodes.length > 60 ? 11 : 28, gap = size + 3;
  // Joint actions that go on stand above each other, so that their lines do not cross others
  const perRow = node => node.actions.some(child) ? 1 : PER_ROW;
  const width = node => Math.min(perRow(node), node.actions.length) * gap, height = node => Math.ceil(node.actions.length / perRow(node)) * gap;
  const columns = [];
  tree.nodes.forEach(node => { columns[node.turn] = Math.max(columns[node.turn] || 0, width(node)); });
  const left = [];
  let x = 8;
  columns.forEach((wide, turn) => { left[turn] = x; x += wide + 70; });
  let y = 26;
  const put = node => {
    const children = node.actions.map(child).filter(Boolean), top = y;
    node.x = left[node.turn];
    children.forEach(put);
    y = Math.max(y, top + height(node) + 6);
    node.y = children.length ? Math.max(top, (children[0].y + children.at(-1).y + height(children.at(-1)) - height(node)) / 2) : top;
    node.actions.forEach((action, k) => { action.x = node.x + k % perRow(node) * gap; action.y = node.y + Math.floor(k / perRow(node)) * gap; });
    y = Math.max(y, node.y + height(node) + 6);
  };
  tree.nodes.filter(node => node.parent === "").forEach(put);
  return {size, left, width: x - 50, height: y + 4};
}
