"use strict";
// Shows rollout trees: a drawing with a square per joint action, and the texts of the chosen node.

const SVG = "http://www.w3.org/2000/svg";

// Makes a text with its colours. Only text nodes are made
function code(text) {
  const pre = document.createElement("pre");
  for (const [kind, piece] of coloured(text)) pre.append(kind ? make("span", {class: kind}, piece) : piece);
  return pre;
}

function tests(text) {
  const pre = document.createElement("pre");
  pre.className = "tests";
  for (const line of text.split("\n")) {
    const span = document.createElement("span");
    span.className = line.startsWith("passed") ? "passed" : "failed";
    span.textContent = line + "\n";
    pre.append(span);
  }
  return pre;
}

function showTrees(data, section) {
  const {texts, columns} = data, trees = data.trees.map(rows => treeOf(rows, columns)), scales = scalesOf(trees);
  const text = number => number === null || number === undefined ? null : texts[number];
  const input = (type, attributes = {}) => make("input", {type, ...attributes});
  const low = input("number", {step: "any"}), high = input("number", {step: "any"}), item = input("search", {placeholder: "item"});
  const turn = make("select", {style: "flex: none"}, make("option", {value: ""}, "all"), [...new Set(trees.flatMap(tree => tree.nodes.map(node => node.turn)))].map(k => make("option", {value: k}, k)));
  const suspicious = input("checkbox"), count = make("span", {class: "dim small"});
  const list = make("select", {"aria-label": "tree"}), drawing = make("div", {class: "drawing", tabindex: 0, "aria-label": "the tree"}), detail = make("div");
  let tree = null, node = null, action = null;

  const matches = action => fits(action, {low: low.value, high: high.value, turn: turn.value, item: item.value, suspicious: suspicious.checked});
  const roles = node => Object.keys(node.prompts).filter(role => node.prompts[role] !== null && node.prompts[role] !== undefined);

  // The drawing

  function element(tag, attributes, content = "") {
    const made = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.textContent = content;
    return made;
  }
  function fill(value) {
    if (value === null) return "var(--back)";  // nothing scored it
    const [low, high] = scales[tree.shown], share = high > low ? (value - low) / (high - low) : .5;
    const [end, part] = share < .5 ? ["--low", 1 - 2 * share] : ["--high", 2 * share - 1];
    return `color-mix(in srgb, var(${end}) ${Math.round(100 * part)}%, var(--middle))`;
  }
  function drawTree() {
    const {size, left, width, height} = place(tree);
    const svg = element("svg", {width, height, viewBox: `0 0 ${width} ${height}`, role: "img"});
    left.forEach((x, turn) => svg.append(element("text", {x, y: 14}, `turn ${turn}`)));
    for (const node of tree.nodes) for (const action of node.actions) {
      const next = child(action);
      if (next) {
        const [x1, y1, x2, y2] = [action.x + size, action.y + size / 2, next.x - 2, next.y + size / 2], middle = (x1 + x2) / 2;
        action.edge = element("path", {d: `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`});
        svg.append(action.edge);
      }
    }
    for (const action of tree.actions) {
      const rect = action.rect = element("rect", {x: action.x, y: action.y, width: size, height: size, rx: 3, style: `fill: ${fill(action[tree.shown])}`});
      rect.action = action;
      rect.append(element("title", {}, `${action.node.key}, joint action ${action.action}: reward ${show(action.reward)}, return ${show(action.return)}`));
      svg.append(rect);
      const mark = (isSuspicious(action) ? "!" : "") + (size > 20 ? action[tree.shown] === null ? "–" : +action[tree.shown].toPrecision(2) : "");
      if (mark) svg.append(element("text", {x: action.x + size / 2, y: action.y + size / 2 + 4, class: "mark"}, mark));
    }
    drawing.replaceChildren(svg);
    paint();
  }
  function paint() {
    const way = new Set();
    for (let at = node; at; at = parentOf(at)) { const before = actionBefore(at); if (before) way.add(before); }
    for (const one of tree.actions) {
      one.rect.setAttribute("class", `${one === action ? "chosen" : ""} ${matches(one) ? "" : "faded"}`);
      one.edge?.setAttribute("class", way.has(one) ? "way" : "");
    }
  }

  // The texts of a node

  function number(name, value) {
    return value === null || value === undefined ? null : make("span", {}, make("span", {class: "dim"}, `${name} `), make("b", {}, show(value)));
  }
  function card(equal, acting) {
    const one = equal.includes(action) ? action : equal[0], times = equal.length > 1 ? ` × ${equal.length}` : "";
    const parts = Object.entries(one.metrics).map(([name, value]) => number(name, value));
    const others = Object.entries(one.extra).filter(([name, value]) => name !== "tests" && name !== "suspicious" && value !== null);
    return make("div", {class: `card ${one === action ? "chosen" : ""} ${matches(one) ? "" : "faded"}`, onclick: () => one !== action && choose(one, false)},
      make("h4", {}, `Joint action ${equal.map(each => each.action).join(", ")}${times}`, isSuspicious(one) ? make("span", {class: "failed"}, `  suspicious: ${one.extra.suspicious || ""}`) : null),
      make("div", {class: "numbers"}, number("reward", show(one.reward)), number("return", [...new Set(equal.map(each => show(each.return)))].join(", ")),
        equal.filter(child).map(each => make("button", {type: "button", onclick: event => { event.stopPropagation(); choose(child(each).actions[0]); }},
          `next turn${times && ` of ${each.action}`}`))),
      make("div", {class: "columns"}, acting.map(role => make("div", {},
        make("div", {class: "numbers"}, make("b", {}, role), number("advantage", one.advantages[role]), number("reward", one.rewards[role]), number("return", one.returns[role])),
        code(text(one.texts[role]) ?? "")))),
      make("details", one === action ? {open: true} : {}, make("summary", {class: "small"}, "Parts and tests"),
        make("div", {class: "numbers"}, parts), one.extra.tests ? tests(one.extra.tests) : null,
        others.map(([name, value]) => make("div", {class: "small"}, make("span", {class: "dim"}, `${name} `), String(value)))));
  }
  function showNode() {
    const acting = roles(node), way = [];
    for (let at = node; at; at = parentOf(at)) way.unshift(at);
    detail.replaceChildren(
      make("h3", {}, `${tree.name}: ${node.prefix ? `episode ${node.prefix.slice(1)}, ` : ""}node ${node.path}, turn ${node.turn}`),
      make("div", {class: "bar small"}, "Way: ", way.map(at => make("button", {type: "button", onclick: () => choose(at.actions[0])}, at.key)),
        make("span", {class: "dim"}, `Acting: ${acting.join(", ")}`), make("a", {href: hash()}, "link to this node")),
      make("details", {open: true}, make("summary", {}, "Prompts"), make("div", {class: "columns"}, acting.map(role => make("div", {}, make("h4", {}, role), code(text(node.prompts[role])))))),
      ...alike(node).map(equal => card(equal, acting)));
  }

  // Choosing

  const hash = () => `#tree=${encodeURIComponent(tree.id)}&node=${encodeURIComponent(node.key)}&action=${action.action}`;
  function open(next) {
    tree = next;
    list.value = String(trees.indexOf(tree));
    node = null;
    const [low, high] = scales[tree.shown];
    legend.replaceChildren(`the ${tree.shown}: `, show(low), " ", make("span", {class: "scale"}), " ", show(high));
  }
  function choose(next, withScroll = true) {
    const isNew = next.node !== node || !drawing.firstChild || !drawing.firstChild.contains(next.rect);
    const needsTree = !tree.actions.includes(next) || !drawing.contains(next.rect || null);
    action = next;
    node = next.node;
    if (needsTree) drawTree(); else paint();
    showNode();
    if (withScroll) {  // inside the drawing only: the page stays where it is
      drawing.scrollTop = Math.max(0, Math.min(drawing.scrollTop, action.y - 40), action.y - drawing.clientHeight + 60);
      drawing.scrollLeft = Math.max(0, Math.min(drawing.scrollLeft, action.x - 40), action.x - drawing.clientWidth + 60);
    }
    history.replaceState(null, "", hash());
    return isNew;
  }
  function fillList() {
    const shown = trees.map((one, k) => [one, k]).filter(([one]) => one.actions.some(action => matches(action)));
    list.replaceChildren(...shown.map(([one, k]) => make("option", {value: k}, `step ${one.step}, ${one.split}, ${one.name}: mean return ${show(one.value)}`)));
    const left = data.left_out ? `, ${data.left_out} more in the files of the run` : "";
    count.textContent = `${shown.length} of ${trees.length} trees${left}`;
    return shown.map(([one]) => one);
  }
  function filter() {
    const shown = fillList();
    if (!shown.length) return detail.replaceChildren(make("p", {}, "No joint action fits the filter."));
    if (!shown.includes(tree)) open(shown[0]);
    list.value = String(trees.indexOf(tree));
    choose(action && tree.actions.includes(action) && matches(action) ? action : tree.actions.find(one => matches(one)));
  }
  function step(direction) {  // to another tree
    const options = [...list.options].map(option => +option.value), at = options.indexOf(trees.indexOf(tree)) + direction;
    if (at < 0 || at >= options.length) return;
    open(trees[options[at]]);
    choose(tree.actions.find(one => matches(one)));
  }
  function match(direction) {  // to another joint action that fits the filter, in this tree or the next one
    const found = tree.actions.filter(one => matches(one) || one === action), next = found[found.indexOf(action) + direction];
    if (next) choose(next); else step(direction);
  }
  function move(direction) {  // up or down in a turn
    const column = tree.actions.filter(one => one.node.turn === node.turn), next = column[column.indexOf(action) + direction];
    if (next) choose(next);
  }
  const keys = {
    ArrowUp: () => move(-1), ArrowDown: () => move(1), "[": () => step(-1), "]": () => step(1), p: () => match(-1), n: () => match(1),
    ArrowLeft: () => actionBefore(node) && choose(actionBefore(node)), ArrowRight: () => child(action) && choose(child(action).actions[0]),
  };
  function fromHash() {
    const wanted = new URLSearchParams(location.hash.slice(1));
    const found = trees.find(one => one.id === wanted.get("tree"));
    if (!found) return false;
    open(found);
    const at = found.byKey.get(wanted.get("node")) || found.nodes[0];
    choose(at.actions.find(one => one.action === +wanted.get("action")) || at.actions[0]);
    section.scrollIntoView();
    return true;
  }

  const legend = make("span", {class: "small dim"});
  section.append(
    make("div", {class: "bar"}, make("label", {}, "reward from", low), make("label", {}, "to", high), make("label", {}, "turn", turn), item, make("label", {}, suspicious, "suspicious"), count),
    make("div", {class: "bar"}, make("button", {type: "button", onclick: () => step(-1), "aria-label": "previous tree"}, "◀"), list, make("button", {type: "button", onclick: () => step(1), "aria-label": "next tree"}, "▶")),
    make("p", {class: "small dim"}, "A square is a joint action, its colour ", legend, ". Lines lead to the turn that follows it. Keys: arrows move, [ and ] change the tree, n and p go to the next and the previous joint action that fits the filter."),
    drawing, detail);
  for (const control of [low, high, item, turn, suspicious]) control.addEventListener("input", filter);
  list.addEventListener("change", () => { open(trees[+list.value]); choose(tree.actions.find(one => matches(one))); });
  drawing.addEventListener("click", event => event.target.action && choose(event.target.action));
  document.addEventListener("keydown", event => {
    const isTyping = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (isTyping || event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    if (event.key.startsWith("Arrow") && !drawing.contains(event.target)) return;  // elsewhere, arrows scroll the page
    event.preventDefault();
    keys[event.key]();
  });
  addEventListener("hashchange", fromHash);
  fillList();
  const hasHash = new URLSearchParams(location.hash.slice(1)).has("tree");
  if (!hasHash || !fromHash()) {
    open(widest(trees));
    const url = location.href;
    choose(tree.actions[0]);
    history.replaceState(null, "", url);
  }
}
