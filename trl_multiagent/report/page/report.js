"use strict";
// Shows the data of a report. All of its texts become text nodes, never HTML.
// Parts of the data, each optional: summary, tables, note, alarms, estimates, matrices, charts, trees, details, texts.

const SECTIONS_OPEN = 2;  // of the charts
const SMOOTHED_FROM = 20;  // points of a line
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
  element.append(...children.flat().filter(child => child !== null && child !== undefined));
  return element;
}

function show(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (value === 0) return "0";  // also -0
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Math.abs(value) >= 1000 || Math.abs(value) < 0.001 ? value.toPrecision(3) : String(+value.toPrecision(4));
}

function table(rows) {
  const cell = (tag, x) => make(tag, String(x).length > 48 ? {class: "long"} : {}, String(x));
  const [head, ...body] = rows;
  return make("div", {class: "scroll"}, make("table", {},
    make("thead", {}, make("tr", {}, head.map(x => make("th", {}, String(x))))),
    make("tbody", {}, body.map(row => make("tr", {}, row.map(x => cell("td", x)))))));
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

// Draws one chart into a box, with a legend below that shows the values at the cursor and switches lines on and off
function draw(chart, box, isSmooth) {
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
      const spread = line.high && line.mean[place] !== null ? ` ± ${show(line.high[place] - line.mean[place])}` : "";
      values[k].textContent = show(line.mean[place]) + spread;
    });
    at.textContent = index === null ? "at the end" : `at step ${chart.x[index]}`;
  };
  const axis = {stroke: () => css("--dim"), grid: {stroke: () => css("--line"), width: .5}, ticks: {show: false}, font: "12px system-ui"};
  const number = (_, ticks) => ticks.map(x => Math.abs(x) >= 1e5 || (x !== 0 && Math.abs(x) < 1e-3) ? x.toExponential(0) : String(+x.toPrecision(6)));
  const plot = new uPlot({
    width: Math.max(200, box.clientWidth), height: 200, legend: {show: false}, scales: {x: {time: false}},
    cursor: {sync: {key: "steps"}, y: false, points: {size: 7}},
    axes: [{...axis, size: 28, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6], values: number}, {...axis, size: 58, values: number}],
    series, bands, padding: [8, 14, 0, 0], hooks: {setCursor: [u => showValues(u.cursor.idx ?? null)]},
  }, data, box);
  showValues(null);
  box.after(legend);
  new ResizeObserver(() => plot.setSize({width: Math.max(200, box.clientWidth), height: 200})).observe(box);
  plots.push(plot);
  return () => { plots.splice(plots.indexOf(plot), 1); plot.destroy(); legend.remove(); };
}

// A chart is drawn when it comes into view
function chartBox(chart, smooth) {
  const box = make("div", {class: "plot"});
  let undo = null;
  const redraw = () => { if (undo) { undo(); undo = draw(chart, box, smooth.checked); } };
  smooth.addEventListener("change", redraw);
  new IntersectionObserver(entries => {
    if (!undo && entries.some(entry => entry.isIntersecting)) undo = draw(chart, box, smooth.checked);
  }, {rootMargin: "300px"}).observe(box);
  return make("div", {class: "chart"}, make("h3", {}, chart.title), box);
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
    if (!estimate) return make("td", {}, "–");
    const column = part.columns[k];
    const range = estimate.low === null || estimate.low === undefined ? "" : ` [${format(estimate.low, column)}, ${format(estimate.high, column)}]`;
    const text = [make("b", {}, format(estimate.mean, column)), make("span", {class: "dim small range"}, range)];
    return make("td", {}, text, estimate.low === undefined || part.plain ? null : interval(estimate, ...ends[k]));
  };
  const [box, title] = part.plain ? ["details", "summary"] : ["div", "h3"];
  return make(box, {}, part.title ? make(title, {}, part.title) : null, make("div", {class: "scroll"}, make("table", {},
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
      row.map(value => { const td = make("td", {class: "heat"}, value.toFixed(3)); td.style.cssText = heat(value); return td; })))))));
}

// The page

function page(data) {
  document.querySelector("h1").textContent = data.title;
  const main = document.querySelector("main"), nav = document.querySelector("nav");
  const section = (title, ...children) => {
    const id = title.toLowerCase().replace(/\W+/g, "-");
    nav.append(make("a", {href: `#${id}`}, title));
    const element = make("section", {id}, make("h2", {}, title), ...children);
    main.append(element);
    return element;
  };
  section("Summary",
    make("dl", {class: "facts"}, (data.summary || []).flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)])),
    (data.alarms || []).map(alarm => make("div", {class: "alarm"}, `${alarm.run ? `${alarm.run}, s` : "S"}tep ${alarm.step}: ${alarm.message}`)),
    (data.tables || []).filter(part => part.rows.length > 1).map(part => [part.title ? make("h3", {}, part.title) : null, table(part.rows)]).flat(),
    data.note ? make("p", {class: "dim small"}, data.note) : null);
  if ((data.estimates || []).length) section("Results", data.estimates.map(estimates));
  if ((data.matrices || []).length) section("Cross-play", data.matrices.map(matrix));
  if ((data.charts || []).length) section("Curves", curves(data.charts));
  if (data.trees && data.trees.trees.length) showTrees(data.trees, section("Rollouts"));
  const details = [
    ...(data.details || []).map(part => [part.title, table(part.rows)]),
    ...(data.texts || []).map(([title, text]) => [title, make("pre", {}, text)]),
  ];
  if (details.length) section("Details", details.map(([title, body]) => make("details", {}, make("summary", {}, title), body)));
}

page(JSON.parse(document.getElementById("data").textContent));
dark.addEventListener("change", () => plots.forEach(plot => plot.redraw()));
