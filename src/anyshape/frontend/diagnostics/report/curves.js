// What a report computes: formulas at sizes, curves, what is alive, and what a limit means. It knows no page, so that
// tests run it alone. Positions are those of the line: the forward's steps, then the backward's.
"use strict";
const Curves = (() => {
  function evaluate(terms, values) {
    let total = 0;
    for (const [coefficient, factors] of terms) {
      let term = coefficient;
      for (const [atom, power] of factors) {
        const value = typeof atom === "string" ? values[atom] : call(atom, values);
        for (let i = 0; i < power; i++) term *= value;
      }
      total += term;
    }
    return total;
  }

  function call(atom, values) {
    const [a, b] = atom.args.map((terms) => evaluate(terms, values));
    if (atom.op === "scaled") return Math.trunc(a * atom.factor);
    if (atom.op === "root") return Math.trunc(Math.sqrt(Math.max(a, 0)));
    if (atom.op === "floordiv") return (a - (((a % b) + b) % b)) / b;
    return atom.op === "max" ? Math.max(a, b) : Math.min(a, b);
  }

  // every formula of a program at these sizes
  const sizes = (program, values) => program.formulas.map((formula) => evaluate(formula.terms, values));

  // what is dropped on a choice of a point (life -> steps, seconds), what is then there only to compute it again, and what
  // is moved out (life -> first and last position away, seconds of copies, seconds of computing it again or null); choice
  // -1: everything is kept
  function state(point, choice) {
    const dropped = new Map(), there = new Set(), moved = new Map();
    for (let i = 0; i <= choice; i++) {
      const one = point.choices[i];
      one.keep.forEach((life) => dropped.delete(life));
      one.stay.forEach((life) => moved.delete(life));
      one.drop.forEach(([life, ...what]) => dropped.set(life, what));
      one.move.forEach(([life, ...what]) => moved.set(life, what));
      one.less.forEach((life) => there.delete(life));
      one.more.forEach((life) => there.add(life));
    }
    return { dropped, there, moved };
  }

  // the first and the last position where a life is not in memory, or null
  const away = (life, i, what) => what.moved.has(i) ? what.moved.get(i) : life.gap && what.dropped.has(i) ? life.gap : null;

  // bytes alive at every position; bytes: of `sizes`; scratch: of the forward and of the backward
  function curve(program, bytes, scratch, what) {
    const change = new Float64Array(program.steps.length + 1);
    const add = (first, last, size) => { change[first] += size; change[last + 1] -= size; };
    program.lives.forEach((life, i) => {
      if (life.only && !what.there.has(i)) return;
      add(life.first, life.last, bytes[life.bytes]);
      const gap = away(life, i, what);
      if (gap) add(gap[0], gap[1], -bytes[life.bytes]);
    });
    let now = 0;
    return Array.from(change.subarray(0, program.steps.length), (step, i) => {
      now += step;
      return now + scratch[i < program.border ? 0 : 1];
    });
  }

  // the first fullest position
  function fullest(found) {
    let at = 0;
    for (let i = 1; i < found.length; i++) if (found[i] > found[at]) at = i;
    return at;
  }

  // what is alive at a position, the largest first: [life, bytes]
  function alive(program, bytes, what, position) {
    const found = [];
    program.lives.forEach((life, i) => {
      if (life.only && !what.there.has(i)) return;
      if (position < life.first || position > life.last) return;
      const gap = away(life, i, what);
      if (gap && gap[0] <= position && position <= gap[1]) return;
      if (bytes[life.bytes] > 0) found.push([i, bytes[life.bytes]]);
    });
    return found.sort((a, b) => b[1] - a[1]);
  }

  // the choice that a call takes under a limit, as the compiler chooses: -1 everything is kept, null: there is none
  function choose(point, limit) {
    if (point.needed <= limit) return -1;
    const found = point.choices.findIndex((choice) => choice.live <= limit && choice.needed <= limit);
    return found < 0 ? null : found;
  }

  // the choice that needs least: -1 there is none
  const lowest = (point) => point.choices.reduce((best, choice, i) =>
    best < 0 || choice.needed <= point.choices[best].needed ? i : best, -1);

  // the lowest limit that works
  const least = (point) => Math.min(point.needed, ...point.choices.map((choice) => choice.needed));

  // the computed point that is nearest in ratios, and whether it is the very one
  function nearest(program, values) {
    let best = null, distance = Infinity;
    for (const point of program.points) {
      const far = program.symbols.reduce((sum, { name }) =>
        sum + Math.abs(Math.log((point.values[name] + 1e-3) / (values[name] + 1e-3))), 0);
      if (far < distance) [best, distance] = [point, far];
    }
    return { point: best, exact: best !== null && program.symbols.every(({ name }) =>
      best.values[name] === values[name]) };
  }

  // what was dropped up to a choice, in order: [life, steps] pairs, what is then needed less, and the cost
  function evictions(point, choice) {
    return point.choices.slice(1, choice + 1).map((one, i) => ({ drop: one.drop, freed: point.choices[i].live - one.live,
                                                             seconds: one.seconds - point.choices[i].seconds }));
  }

  // every computed point and choice again, from the formulas: how many peaks were compared, and how many differ
  function check(program) {
    let compared = 0, wrong = 0;
    for (const point of program.points) {
      const bytes = sizes(program, point.values);
      point.choices.forEach((choice, i) => {
        const found = curve(program, bytes, point.scratch, state(point, i));
        compared++;
        if (found[fullest(found)] !== choice.peak) wrong++;
      });
    }
    return { compared, wrong };
  }

  return { evaluate, sizes, state, curve, fullest, alive, choose, lowest, least, nearest, evictions, check };
})();
if (typeof module !== "undefined") module.exports = Curves;
