// The page: sliders, the chart and the tables, drawn from the data and what curves.js computes. Text is set as text.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  const SHOWN = 12; // rows of a table before "show all"
  const now = { program: 0, values: [], limit: 0, step: null, all: {} };

  // --- words

  function element(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (typeof value === "function") made.addEventListener(key, value);
      else if (value !== null && value !== false) made.setAttribute(key, value === true ? "" : value);
    }
    made.append(...children.filter((child) => child !== null && child !== ""));
    return made;
  }
  function drawn(name, attributes, text = "") {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.textContent = text;
    return made;
  }
  function bytesText(bytes) {
    const [unit, name] = bytes >= 1e9 ? [1e9, "GB"] : bytes >= 1e6 ? [1e6, "MB"] : bytes >= 1e3 ? [1e3, "kB"] : [1, "B"];
    const value = bytes / unit;
    return `${value.toFixed(unit === 1 || value >= 100 ? 0 : value >= 10 ? 1 : 2)} ${name}`;
  }
  const time = (seconds) => seconds >= 1 ? `${seconds.toFixed(2)} s` : seconds >= 1e-3
    ? `${(seconds * 1e3).toFixed(1)} ms` : `${(seconds * 1e6).toFixed(0)} µs`;
  const percent = (part, whole) => whole ? `${Math.round(100 * part / whole)} %` : "";
  const count = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;
  const values = (program) => Object.fromEntries(program.symbols.map(({ name }, i) => [name, now.values[i]]));
  const sizesText = (found) => Object.entries(found).map(([name, value]) => `${name} = ${value}`).join(", ");
  const place = (program, i) => {
    const step = program.steps[i];
    return step.part ? `${step.part} ${step.number}` : `step ${step.number}`;
  };

  // --- everything that follows from the sliders

  function computed() {
    const program = data.programs[now.program];
    const here = values(program);
    const { point, exact } = Curves.nearest(program, here);
    const bytes = Curves.sizes(program, here);
    const refused = program.nonnegative.some((one) => bytes[one] < 0) || point === null;
    const scratch = point === null ? [0, 0] : point.scratch;
    const none = { dropped: new Map(), there: new Set(), moved: new Map() };
    const choice = point === null ? -1 : Curves.choose(point, now.limit);
    const shown = choice === null ? Curves.lowest(point) : choice;
    const what = point === null ? none : Curves.state(point, shown);
    const before = Curves.curve(program, bytes, scratch, none);
    const after = Curves.curve(program, bytes, scratch, what);
    return { program, here, point, exact, bytes, refused, scratch, choice, shown, what, before, after,
             step: now.step === null ? Curves.fullest(after) : Math.min(now.step, after.length - 1) };
  }

  // --- controls

  function slider(label, note, least, greatest, start, marks, changed) {
    const id = `s${document.querySelectorAll("input").length}`;
    const list = element("datalist", { id: `${id}-marks` }, ...marks.map((value) => element("option", { value })));
    const range = element("input", { type: "range", id, min: least, max: greatest, step: 1, value: start,
                                     list: `${id}-marks`, input: () => { field.value = range.value; changed(+range.value); } });
    const field = element("input", { type: "number", min: least, max: greatest, step: 1, value: start, "aria-label": label,
                                     change: () => {
      const value = Math.min(greatest, Math.max(least, Math.round(+field.value) || least));
      field.value = range.value = value;
      changed(value);
    } });
    return element("div", { class: "control" }, element("label", { for: id }, label, " ", element("small", {}, note)),
                   element("span", { class: "field" }, field), range, list);
  }

  function controls() {
    const program = data.programs[now.program];
    const box = at("controls");
    box.replaceChildren();
    if (data.programs.length > 1) {
      const select = element("select", { id: "program", change: () => begin(+select.value, {}) },
        ...data.programs.map((one, i) => element("option", { value: i, selected: i === now.program },
          `${one.parts.join(" and ")}${one.where ? `, ${one.where}` : ""}`)));
      box.append(element("div", { class: "control" }, element("label", { for: "program" }, "Program"), select));
    }
    program.symbols.forEach((symbol, i) => {
      if (!symbol.matters) return;
      box.append(slider(symbol.name, symbol.place, symbol.least, symbol.greatest, now.values[i], symbol.marks,
                        (value) => { now.values[i] = value; show(); }));
    });
    if (limits(program)) box.append(limitControl(program));
  }

  function limitControl(program) {
    const highest = () => { const { point } = Curves.nearest(program, values(program)); return point.needed; };
    const lowest = () => Curves.least(Curves.nearest(program, values(program)).point);
    const range = element("input", { type: "range", id: "limit", min: 0, max: 1000, step: 1, input: () => {
      const [low, high] = [lowest() * 0.98, highest() * 1.02];
      set(Math.round(low + (high - low) * range.value / 1000));
    } });
    const field = element("input", { type: "number", id: "limit-mb", step: "any", min: 0, "aria-label": "limit in MB",
                                     change: () => set(Math.round(+field.value * 1e6) || 0) });
    const set = (bytes) => { now.limit = bytes; show(); };
    const button = (text, bytes) => element("button", { type: "button", click: () => set(bytes()) }, text);
    const buttons = element("div", { class: "buttons" }, button("everything kept", highest),
      ...[75, 50].map((part) => button(`${part} %`, () => Math.floor(highest() * part / 100))),
      button("least that works", lowest), program.limited ? button("as it was set", () => program.limited) : null);
    now.sync = () => {
      const [low, high] = [lowest() * 0.98, highest() * 1.02];
      range.value = Math.round(1000 * (now.limit - low) / (high - low || 1));
      field.value = (now.limit / 1e6).toFixed(3).replace(/\.?0+$/, "");
    };
    return element("div", { class: "control" }, element("label", { for: "limit" }, "Limit ", element("small", {},
      "forward and backward together")), element("span", { class: "field" }, field, "MB"), range, buttons);
  }

  // --- the chart

  function nice(most) {
    const rough = most / 5, unit = 10 ** Math.floor(Math.log10(rough || 1));
    return unit * [1, 2, 2.5, 5, 10].find((factor) => factor * unit >= rough);
  }

  const limits = (program) => program.again || program.limited > 0; // else there is one curve only

  function legend(program) {
    const entries = limits(program) ? [["before", "everything kept"], ["after", "under the limit"], ["limit", "limit"]]
      : [["after", "bytes alive"]];
    at("legend").replaceChildren(...entries.map(([name, text]) =>
      element("li", {}, element("span", { class: `swatch ${name}` }), text)));
  }

  function chart(found) {
    const { program, before, after } = found;
    const width = Math.max(280, at("chart").clientWidth), height = width < 560 ? 240 : 320;
    const [left, right, top, bottom] = [58, 8, 22, 24];
    const limited = limits(program);
    const most = Math.max(...before, ...after, limited && now.limit < 1.3 * Math.max(...before) ? now.limit : 0) * 1.06 || 1;
    const x = (i) => left + (width - left - right) * i / after.length;
    const y = (bytes) => height - bottom - (height - top - bottom) * bytes / most;
    const line = (curve) => curve.map((bytes, i) => `${i ? "V" : `M${x(0)},`}${y(bytes).toFixed(1)}H${x(i + 1).toFixed(1)}`).join("");
    const closed = (curve) => `${line(curve)}V${y(0)}H${x(0)}Z`;
    const peak = Curves.fullest(after);
    const words = `Bytes alive over ${after.length} steps: at most ${bytesText(after[peak])}, at ${place(program, peak)}`
      + (limited ? `; with everything kept at most ${bytesText(Math.max(...before))}; limit ${bytesText(now.limit)}.` : ".");
    const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": words });
    for (let bytes = 0, step = nice(most); bytes <= most; bytes += step) {
      svg.append(drawn("line", { class: "grid", x1: left, x2: width - right, y1: y(bytes), y2: y(bytes) }),
                 drawn("text", { x: left - 6, y: y(bytes) + 4, "text-anchor": "end" }, bytes ? bytesText(bytes) : "0"));
    }
    const parts = program.border < after.length ? [["forward", 0, program.border], ["backward", program.border, after.length]]
      : [["steps", 0, after.length]];
    for (const [name, first, last] of parts) {
      svg.append(drawn("text", { x: (x(first) + x(last)) / 2, y: height - 6, "text-anchor": "middle" }, name));
      if (first) svg.append(drawn("line", { class: "border", x1: x(first), x2: x(first), y1: top, y2: height - bottom }));
    }
    for (const [name, curve] of limited ? [["before", before], ["after", after]] : [["after", after]]) {
      svg.append(drawn("path", { class: `area ${name}`, d: closed(curve) }), drawn("path", { class: `curve ${name}`, d: line(curve) }));
    }
    if (limited && now.limit <= most) {
      svg.append(drawn("line", { class: "limit", x1: left, x2: width - right, y1: y(now.limit), y2: y(now.limit) }),
                 drawn("text", { class: "limit", x: left + 6, y: Math.max(12, y(now.limit) - 6) }, `limit ${bytesText(now.limit)}`));
    }
    const middle = (x(found.step) + x(found.step + 1)) / 2;
    svg.append(drawn("line", { class: "cursor", x1: middle, x2: middle, y1: top, y2: height - bottom }),
               drawn("circle", { class: "dot", cx: middle, cy: y(after[found.step]), r: 5 }));
    const pick = (event) => {
      const box = svg.getBoundingClientRect(), where = (event.clientX - box.left) * width / box.width;
      now.step = Math.max(0, Math.min(after.length - 1, Math.floor((where - left) / (width - left - right) * after.length)));
      show();
    };
    svg.addEventListener("pointerdown", pick);
    svg.addEventListener("pointermove", (event) => { if (event.buttons) pick(event); });
    at("chart").replaceChildren(svg);
  }

  function stepping(found) {
    const old = at("step-range");
    if (old && +old.max === found.after.length - 1) { old.value = found.step; return; }
    const range = element("input", { type: "range", id: "step-range", min: 0, max: found.after.length - 1, step: 1,
                                     value: found.step, input: () => { now.step = +range.value; show(); } });
    at("stepping").replaceChildren(element("div", { class: "control" },
      element("label", { for: "step-range" }, "Step ", element("small", {}, "shown below; or touch the chart")),
      element("button", { type: "button", click: () => { now.step = null; show(); } }, "the fullest"), range));
  }

  // --- words and tables

  function tile(name, title, bytes, note) {
    return element("div", { class: name }, element("dt", {}, title),
      element("dd", {}, element("data", { value: bytes, id: `tile-${name.split(" ")[0]}` }, bytesText(bytes)), element("small", {}, note)));
  }

  function tiles(found) {
    const { point, choice, shown, before, after, exact } = found;
    const [high, low] = [Math.max(...before), Math.max(...after)];
    const near = exact ? "" : ", at the nearest computed sizes";
    const made = [tile("before", limits(found.program) ? "Everything kept, at the peak" : "Alive, at the peak", high, `${bytesText(point.needed)} with the layout${near}`)];
    if (limits(found.program)) {
      const needed = shown < 0 ? point.needed : point.choices[shown].needed;
      const moved = found.what.moved.size ? `${found.what.moved.size} moved out, ` : "";
      const work = shown < 0 ? "nothing is computed again" : `${count(found.what.dropped.size, "value")} computed again, `
        + `${moved}about ${time(point.choices[shown].seconds)} longer`;
      const told = choice === null ? `no choice stays within it: ${bytesText(Curves.least(point))} is the least`
        : now.limit >= point.needed ? "everything fits" : `${percent(now.limit, point.needed)} of what everything needs`;
      made.push(tile("after", choice === null ? "With all dropped that can be" : "Under the limit, at the peak", low,
                     `${bytesText(needed)} with the layout${near}; ${work}`),
                tile(choice === null ? "limit refused" : "limit", "Limit", now.limit, told));
    }
    at("tiles").replaceChildren(...made);
  }

  function status(found) {
    const { exact, refused, point, program } = found;
    const said = refused ? "The program does not take these sizes."
      : exact ? "Computed at these very sizes: curve, scratch and choice are what a call does."
      : `Between computed sizes: values are exact, by their formulas; scratch and choice are those at ${sizesText(point.values)}.`;
    at("status").textContent = `${said} ${count(program.points.length, "set")} of sizes ${program.points.length === 1 ? "is" : "are"} computed.`;
  }

  function stepText(found) {
    const { program, step, before, after } = found;
    const one = program.steps[step];
    at("step").replaceChildren(element("strong", {}, place(program, step)), `: ${one.what}, ${bytesText(after[step])} alive`,
      before[step] === after[step] ? "" : ` (${bytesText(before[step])} with everything kept)`,
      ...(one.where ? [element("br"), element("code", {}, one.where)] : []));
  }

  function table(id, caption, heads, rows, cells) {
    const shown = now.all[id] ? rows : rows.slice(0, SHOWN);
    const made = [element("table", {}, element("caption", {}, caption),
      element("thead", {}, element("tr", {}, ...heads.map(([text, kind]) => element("th", { scope: "col", class: kind }, text)))),
      element("tbody", {}, ...shown.map((row) => element("tr", {}, ...cells(row)))))];
    if (rows.length > SHOWN) {
      made.push(element("button", { type: "button", click: () => { now.all[id] = !now.all[id]; show(); } },
        now.all[id] ? "show fewer" : `show all ${rows.length}`));
    }
    at(id).replaceChildren(...made);
  }
  const cell = (kind, ...children) => element("td", { class: kind || null }, ...children);
  const named = (life) => [element("code", {}, life.name), ...(life.where ? [element("br"), element("code", { class: "soft" }, life.where)] : [])];

  function aliveTable(found) {
    const { program, bytes, what, step, after, scratch } = found;
    const rows = Curves.alive(program, bytes, what, step);
    const most = rows.length ? rows[0][1] : 1, work = scratch[step < program.border ? 0 : 1];
    const fullest = step === Curves.fullest(after) ? ", the fullest step" : "";
    table("alive", `${count(rows.length, "value")} at ${place(program, step)}${fullest}: ${bytesText(after[step])}`
      + `${work ? `, ${bytesText(work)} of it threads' scratch` : ""}`,
      [["value and the line that makes it", ""], ["bytes", "number"], ["what it is", "wide"], ["formula", "wide formula"]], rows,
      ([i, size]) => {
        const life = program.lives[i];
        return [cell("", ...named(life)), cell("number bytes", bytesText(size), element("span", { style: `width:${(100 * size / most).toFixed(1)}%` })),
                cell("wide", life.kind), cell("wide formula", element("code", {}, program.formulas[life.bytes].text))];
      });
  }

  function evictionTable(found) {
    const { program, bytes, point, shown, choice, what } = found;
    if (shown >= 1 && choice !== null && what.moved.size) return stateTable(found);
    if (shown < 1 || choice === null) {
      const said = !program.again ? "Nothing of this program can be computed again: it has no backward, or was compiled without a limit."
        : choice === null ? "No choice stays within this limit, so a call is refused before it begins." : shown === 0
        ? "Nothing has to be dropped: it fits once the backward gives saved values back piece by piece." : "Everything fits, so nothing is dropped.";
      at("evictions").replaceChildren(element("p", {}, said));
      return;
    }
    const away = ([i]) => {
      const [first, last] = program.lives[i].gap;
      return element("div", {}, `${place(program, first)} to ${place(program, last)}`);
    };
    table("evictions", `In the order of the choice: of the values that relieve the fullest step of the layout, the one that costs the `
      + `least work for its bytes, so that the need falls from row to row. ${count(point.choices[shown].steps, "step")} of the backward run for it.`,
      [["value and the line that makes it", ""], ["bytes", "number"], ["not there from", "wide"], ["need falls by", "number"], ["costs", "number"]],
      Curves.evictions(point, shown), (row) => [
        cell("", ...row.drop.map(([i]) => element("div", {}, ...named(program.lives[i])))),
        cell("number", bytesText(row.drop.reduce((sum, [i]) => sum + bytes[program.lives[i].bytes], 0))),
        cell("wide", ...row.drop.map(away)), cell("number", bytesText(row.freed)),
        cell("number", time(row.seconds), element("br"), element("span", { class: "soft" },
          count(row.drop.reduce((sum, [, steps]) => sum + steps, 0), "step")))]);
  }

  // beside values that are moved out, choice by choice says little: one may be dropped first, and moved out later
  function stateTable({ program, bytes, what }) {
    if (!what.dropped.size) {
      at("evictions").replaceChildren(element("p", {}, "Nothing is computed again: moving values out is enough."));
      return;
    }
    const rows = largest(program, bytes, what.dropped);
    table("evictions", `${count(rows.length, "value")}, the largest first.`,
      [["value and the line that makes it", ""], ["bytes", "number"], ["not there from", "wide"], ["costs", "number"]], rows, ([i, [steps, seconds]]) => [
        cell("", ...named(program.lives[i])), cell("number", bytesText(bytes[program.lives[i].bytes])), cell("wide", between(program, program.lives[i].gap)),
        cell("number", time(seconds), element("br"), element("span", { class: "soft" }, count(steps, "step")))]);
  }
  const largest = (program, bytes, some) => [...some].sort(([a], [b]) => bytes[program.lives[b].bytes] - bytes[program.lives[a].bytes]);
  const between = (program, [first, last]) => first > last ? "never: its copies take too long" : `${place(program, first)} to ${place(program, last)}`;

  function movedTable({ program, bytes, what }) {
    if (!what.moved.size) {
      at("moved").replaceChildren(element("p", {}, program.moves ? "Nothing is moved out under this limit."
        : "There is no folder for values (memory_store), so nothing is moved out."));
      return;
    }
    const rows = largest(program, bytes, what.moved);
    const total = rows.reduce((sum, [i]) => sum + bytes[program.lives[i].bytes], 0);
    table("moved", `${count(rows.length, "value")}, ${bytesText(total)}: copied to the store after the last use in the forward, and back before the first `
      + "in the backward, while the steps go on.", [["value and the line that makes it", ""], ["bytes", "number"], ["its memory is free from", ""], ["copies", "number"], ["why", "wide"]],
      rows, ([i, [first, last, copies, again]]) => [
        cell("", ...named(program.lives[i])), cell("number", bytesText(bytes[program.lives[i].bytes])), cell("", between(program, [first, last])), cell("number", time(copies)),
        cell("wide", again === null ? "it cannot be computed again" : `computing it again takes ${time(again)}, or memory where it is short`)]);
  }

  function open(found) {
    const { program, bytes } = found;
    const items = program.undecided.map((one) => element("li", {}, "Which is larger depends on the sizes: ",
      element("code", {}, program.formulas[one].text), ` (${bytesText(bytes[one])} here)`));
    items.push(...data.notes.map((note) => element("li", {}, `${note.name}, ${note.stage}: ${note.reason}`)));
    const given = found.point && typeof found.point.chosen === "object" && found.point.chosen;
    if (given) items.push(element("li", {}, `Under the limit that was set, at ${sizesText(found.point.values)}: ${given.what}. ${given.why}. Do: ${given.do}.`));
    at("open").replaceChildren(items.length ? element("ul", {}, ...items)
      : element("p", {}, "Nothing: every size of the layouts is decided by its formula, and everything is compiled."));
  }

  function show() {
    const found = computed();
    if (found.point === null) {
      at("status").textContent = "The program takes none of the sizes that were asked for.";
      return;
    }
    if (now.sync) now.sync();
    status(found); tiles(found); legend(found.program); chart(found); stepping(found); stepText(found); aliveTable(found); evictionTable(found); movedTable(found); open(found);
    document.body.dataset.fullest = Curves.fullest(found.after);
    document.body.dataset.choice = found.choice === null ? "none" : found.choice;
  }

  // --- from the beginning: a program, with sizes and a limit as the address gives them (#x_0=8&limit=1000000)

  function begin(number, asked) {
    const program = data.programs[number];
    Object.assign(now, { program: number, step: "step" in asked ? +asked.step : null, sync: null });
    now.values = program.symbols.map(({ name, least, greatest, start }) =>
      name in asked ? Math.min(greatest, Math.max(least, Math.round(+asked[name]) || least)) : start);
    const { point } = Curves.nearest(program, values(program));
    now.limit = "limit" in asked ? +asked.limit : program.limited || (point === null ? 0
      : program.again ? Math.max(Curves.least(point), Math.floor(point.needed * 0.6)) : point.needed);
    controls();
    show();
  }

  const asked = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  const total = data.programs.map(Curves.check).reduce((a, b) => ({ compared: a.compared + b.compared, wrong: a.wrong + b.wrong }), { compared: 0, wrong: 0 });
  const check = at("check");
  check.className = total.wrong ? "bad" : "good";
  Object.assign(check.dataset, total);
  check.textContent = total.compared ? total.wrong ? `${total.wrong} of ${total.compared} peaks computed here differ from the compiler's: report this as a bug.`
    : `${total.compared} peaks computed here equal those that the compiler computed.` : "";
  at("about").textContent = `${count(data.programs.length, "program")}, ${data.limit ? `compiled with memory_limit=${data.limit} (${bytesText(data.limit)})` : "compiled without a limit"}. `
    + "Forward and backward are one line of steps.";
  addEventListener("resize", () => chart(computed()));
  begin(Math.min(data.programs.length - 1, +asked.program || 0), asked);
})();
