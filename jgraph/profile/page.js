// A profile, from the data of jgraph/profile/report.py, with what jgraph/page.html has for all pages.

// The first three as in jgraph/schedule/draw.py; the others as far from these and from each other as a search found them, for
// readers with and without each kind of colour blindness.
const COLOURS = {
  forward: "#56B4E9", dgrad: "#E69F00", wgrad: "#009E73", recompute: "#1F33A8", attention: "#E0EF3E", loss: "#BD1F1F",
  router: "#E9D4B2", dispatch: "#B774B9", experts: "#8F0F31", combine: "#79DF71",
  quantize: "#F2A6D8", optimizer: "#DE6321", "all-gather": "#9A71F7", "reduce-scatter": "#B540AC", "all-reduce": "#662A6A", "all-to-all": "#5B3DF7",
  transfer: "#49F7F7", copies: "#98BC91", control: "#A6A6A6", other: "#626262",
};
const colourOf = (category) => COLOURS[category] ?? COLOURS.other;
const tint = (category, chunk, chunks) => {
  const share = (0.55 * chunk) / Math.max(chunks - 1, 1);
  const parts = [1, 3, 5].map((at) => parseInt(colourOf(category).slice(at, at + 2), 16));
  return "#" + parts.map((value) => Math.round(value + (255 - value) * share).toString(16).padStart(2, "0")).join("");
};
const textOn = (colour) => {
  const [red, green, blue] = [1, 3, 5].map((at) => (parseInt(colour.slice(at, at + 2), 16) / 255) ** 2.2);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.18 ? "#000" : "#fff";
};

const named = (category) => {
  const style = category === "idle" ? null : `background: ${colourOf(category)}`;
  return h("span", { class: "category" }, h("span", { class: `swatch ${category}`, style, "aria-hidden": "true" }), category);
};
const legend = (categories, ...more) =>
  h("ul", { class: "legend" }, [...categories.map(named), ...more].filter(Boolean).map((entry) => h("li", null, entry)));
// The last two components of a path. The pointer shows all.
const place = (path) => h("code", { "data-tip": path || null }, path.split("/").slice(-2).join("/"));
const LEFT = 64;
const axis = (x, from, to, bottom) => [s("text", { class: "muted", x: 0, y: bottom + 14 }, "ms"),
  ...ticks(from, to, (x(to) - x(from)) / 90).flatMap(([time, text]) => [
    s("line", { class: "grid", x1: x(time), x2: x(time), y1: 0, y2: bottom }),
    s("text", { class: "muted", x: x(time), y: bottom + 14, "text-anchor": "middle" }, text)])];

function summary({ captured, uncaptured }) {
  if (!captured && !uncaptured) return;
  const ofRanks = (key) => (uncaptured?.ranks.length ? mean(uncaptured.ranks.map((rank) => rank[key])) : null);
  const rows = [
    ["step, ms", captured?.step_ms, uncaptured?.step_ms],
    ["device busy, ms", captured?.busy_ms, ofRanks("busy_ms")],
    ["device idle, ms", captured?.idle_ms, ofRanks("idle_ms")],
    ["graph launches", captured?.launches, null, atMost(2)],
    ["graph updates", captured?.updates, null, atMost(2)],
    ["graph re-records", captured?.records, null, atMost(2)],
    ["host in launches, ms", captured?.launch_ms, null],
    ["host in updates, ms", captured?.update_ms, null],
  ].filter(([, ...values]) => values.some((value) => typeof value === "number"));
  const runs = [[captured, "captured: time of the run"], [uncaptured, captured ? "uncaptured: time by kernel" : "value"]];
  const shown = [0, 1].filter((i) => runs[i][0]);
  const cells = ([name, a, b, show]) => [name, ...shown.map((i) => number([a, b][i], show))];
  const spread = ({ steps_ms: steps }) =>
    steps?.length ? ` (${plural(steps.length, "step")}, ${ms(Math.min(...steps))} to ${ms(Math.max(...steps))} ms).` : ".";
  panel("Summary",
    captured && h("p", null, "A step takes ", h("strong", null, `${brief(captured.step_ms)} ms`),
      " as training runs it, from command buffers", spread(captured)),
    captured && uncaptured && h("p", null, "Without command buffers, so that each kernel has a name, it took ",
      `${brief(uncaptured.step_ms)} ms`, spread(uncaptured), " Categories, groups and the timeline are of that run."),
    !captured && h("p", null, "A step takes ", h("strong", null, `${brief(uncaptured.step_ms)} ms`), spread(uncaptured)),
    table("summary-table",  captured
      ? "Of one step, mean over ranks; graphs and the host's time: of all ranks together" : "Of one step, mean over ranks", ["", ...shown.map((i) => runs[i][1])], rows.map(cells),
      { sortable: false }));
}

function whereTheTimeWent({ uncaptured }) {
  if (!uncaptured?.ranks.length) return;
  const { ranks, step_ms: step } = uncaptured;
  const known = Object.keys(COLOURS);
  const categories = [...new Set([...known, ...ranks.flatMap((rank) => Object.keys(rank.categories))])]
    .filter((category) => ranks.some((rank) => category in rank.categories));
  const over = (category, key) => mean(ranks.map((rank) => rank.categories[category]?.[key] ?? 0));
  const idle = mean(ranks.map((rank) => rank.idle_ms));
  const timeOf = (rank, category) => (category === "idle" ? rank.idle_ms : rank.categories[category]?.ms ?? 0);
  const total = (rank) => [...categories, "idle"].reduce((sum, category) => sum + timeOf(rank, category), 0);
  const draw = (width) => {
    const row = 30;
    const longest = Math.max(step, ...ranks.map(total));
    const x = (time) => LEFT + ((width - LEFT - 24) * time) / longest;
    const bars = ranks.map((rank, r) => {
      let from = 0;
      const segments = [...categories, "idle"].map((category) => {
        const time = timeOf(rank, category);
        const [room, fill] = [x(time) - LEFT, category === "idle" ? "url(#idle)" : colourOf(category)];
        const text = [`${category} ${hundredths(time)}`, category, hundredths(time)].find((label) => widthOf(label) + 8 < room);
        const tip = `${category}, rank ${rank.rank}\n${ms(time)} ms, ${percent(time / step)} of the step`;
        const style = category === "idle" ? null : `fill: ${textOn(fill)}`;
        from += time;
        return [
          s("rect", { class: "segment", x: x(from) - room, y: r * row + 3, width: room, height: row - 6, fill, "data-tip": tip }),
          text && s("text", { class: "label", x: x(from) - room / 2, y: (r + 0.5) * row, style }, text)];
      });
      return [s("text", { class: "side", x: 0, y: (r + 0.5) * row }, `rank ${rank.rank}`), ...segments.flat()];
    });
    const label = "Time of a step by category; the table below has its numbers";
    const height = ranks.length * row + 4;
    return s("svg", { width, height: height + 20, role: "img", "aria-label": label }, axis(x, 0, longest, height), bars);
  };
  const rows = categories.map((category) => [named(category), number(over(category, "ms")), number(over(category, "ms") / step, percent),
    number(over(category, "kernel_ms")), number(over(category, "kernels"), atMost(1))]);
  rows.push([named("idle"), number(idle), number(idle / step, percent), number(null), number(null)]);
  const least = ranks.reduce((a, b) => (b.attributed < a.attributed ? b : a));
  const caption = `Mean over ${plural(ranks.length, "rank")}. Exposed: not hidden behind other kernels; with idle it adds up to ` +
    "the step. Kernel ms includes hidden time.";
  panel("Where the time went", legend([...categories, "idle"]), chart(draw),
    table("categories", caption, ["category", "exposed ms", "share of step", "kernel ms", "kernels"], rows),
    h("p", null, `${percent(least.attributed)} of the busy time has a category`,
      ranks.length > 1 ? ` on rank ${least.rank}, the least of all.` : "."));
}

function whatToFixFirst({ groups, roofline }) {
  if (!groups.length) return;
  const share = ({ roofline_ms: least, ms: time }) => number(least == null ? null : least / time, percent);
  const rows = groups.map((group) => [group.label, named(group.category), place(group.source), number(group.count, whole),
    number(group.ms), number(group.roofline_ms), share(group), group.bound, number(group.over_ms)]);
  const kinds = [["matmuls", "product_flops", "FLOP/s"], ["copies", "copy_bytes", "B/s"], ["links", "link_bytes", "B/s"]];
  const reached = roofline && kinds.map(([name, key, unit]) => [name, roofline[`${key}_per_second`], unit])
    .filter(([, value]) => value != null).map(([name, value, unit]) => `${name} ${rate(value, unit)}`).join(", ");
  const caption = "Kernels of rank 0 in a step, grouped by work and shape. " + (roofline
    ? `Roofline: lower bound of their time on ${roofline.name} (${reached}; ${roofline.source}). Over: time above it.`
    : "The rates of this device are unknown, so there is no roofline.");
  const result = table("groups", caption,
    ["kernels", "category", "source", "count", "ms", "roofline ms", "share of roofline", "bound", "over ms"], rows, { sorted: roofline ? 8 : 4 });
  panel("What to fix first", folded(result));
}

function whereInTheCode({ uncaptured, lines = [], scopes = [] }) {
  const totals = (id, caption, rows, show, none) => rows.length ? folded(table(id, caption, [id, "ms", "share of step", "kernels"],
    rows.map(({ name, count, ms: time }) => [name ? show(name) : h("span", { class: "muted" }, none), number(time),
      number(time / uncaptured.step_ms, percent), number(count, whole)]), { sorted: 1 })) : null;
  if (!lines.length && !scopes.length) return;
  panel("Where in the code",
    totals("line", "Time of rank 0 in a step by the innermost line of your code", lines, place, "no line"),
    totals("scope", "The same by named scope", scopes, (name) => name, "no scope"));
}

function collectives({ collectives: found = [] }) {
  if (!found.length) return;
  const hiders = ({ hidden_by: by }) => by.map(([label, time]) => `${label} (${ms(time)} ms)`).join(", ");
  panel("Collectives", table("collectives", "Of rank 0 in a step. Exposed: no other kernel runs. Hidden by: the kernels that run " +
    "at the same time the longest.", ["collective", "category", "count", "ms", "exposed ms", "hidden ms", "hidden by"],
    found.map((row) => [row.label, named(row.category), number(row.count, whole), number(row.ms), number(row.exposed_ms),
      number(row.hidden_ms), hiders(row)]), { sorted: 4 }));
}

function graphs({ graphs: found = [] }) {
  if (!found.length) return;
  panel("CUDA graphs", table("graphs", "Of rank 0 in a step. Named: kernels with the name of an instruction, which may be an " +
    "equal one elsewhere.", ["graph", "program", "launches", "kernels", "ms", "named ms"],
    found.map((row) => [row.graph, row.module, number(row.launches, whole), number(row.count, whole), number(row.ms),
      number(row.named_ms)])));
}

function pipeline({ pipeline: plan }) {
  if (!plan) return;
  const { actions, chunks, ranks } = plan;
  const of = (action) => `${action.kind} of ${chunks > 1 ? `chunk ${action.chunk + 1}, ` : ""}microbatch ${action.microbatch}`;
  const slowness = (time) => `${ms(Math.abs(time))} ms ${time < 0 ? "below" : "above"} the median`;
  const about = (action) => `${of(action)}, rank ${action.rank}
    planned ${ms(action.planned_start_ms)} to ${ms(action.planned_end_ms)} ms
    measured ${ms(action.start_ms)} to ${ms(action.end_ms)} ms, ${slowness(action.slow_ms)}`;
  // One stop for Tab; from there arrows go from box to box, up and down to the nearest in time.
  const move = (event) => {
    const [box, row] = [event.target, event.target.parentNode];
    const distance = (other) => Math.abs(other.getAttribute("x") - box.getAttribute("x"));
    const beside = (other) => [...(other?.children ?? [])].sort((a, b) => distance(a) - distance(b))[0];
    const next = {
      ArrowRight: () => box.nextSibling, ArrowLeft: () => box.previousSibling,
      ArrowUp: () => beside(row.previousSibling), ArrowDown: () => beside(row.nextSibling),
      Home: () => row.firstChild, End: () => row.lastChild,
    }[event.key];
    if (!next) return;
    event.preventDefault();
    next()?.focus();
  };
  const enter = (event) => {
    event.currentTarget.querySelector("[tabindex='0']").setAttribute("tabindex", -1);
    event.target.setAttribute("tabindex", 0);
  };
  const runs = [["planned", "planned_start_ms", "planned_end_ms"], ["measured", "start_ms", "end_ms"]];
  const measured = new Map();
  const draw = (width) => {
    const [row, head] = [ranks > 16 ? 16 : 22, 24];
    const ends = actions.flatMap((action) => [action.end_ms, action.planned_end_ms]);
    const longest = Math.max(plan.planned.step_ms, plan.measured.step_ms, ...ends);
    const x = (time) => LEFT + ((width - LEFT - 24) * time) / longest;
    const part = head + ranks * row + 6;
    const narrowest = Math.min(...actions.flatMap((action) => runs.map(([, start, end]) => x(action[end]) - x(action[start]))));
    const size = Math.min(12, Math.max(9, (12 * (narrowest - 2)) / widthOf(String(plan.microbatches - 1))));
    const [around, rows, numbers] = [[], [], []];
    runs.forEach(([name, start, end], p) => {
      const { step_ms: step, bubble } = plan[name];
      const title = `${name}: ${brief(step)} ms, bubble ${percent(bubble)}`;
      around.push(s("text", { class: "muted", x: LEFT, y: p * part + 16 }, title),
        s("line", { class: "end", x1: x(step), x2: x(step), y1: p * part + head - 4, y2: (p + 1) * part - 4 }));
      for (let rank = 0; rank < ranks; rank++) {
        const top = p * part + head + rank * row;
        const own = actions.filter((action) => action.rank === rank).sort((a, b) => a[start] - b[start]);
        around.push(s("text", { class: "side", x: 0, y: top + row / 2 }, `rank ${rank}`));
        rows.push(s("g", null, own.map((action) => {
          const [from, room] = [x(action[start]), x(action[end]) - x(action[start])];
          const fill = tint(action.kind, action.chunk, chunks);
          const box = s("rect", { class: "segment", x: from, y: top + 1, fill, width: Math.max(room, 0.5), height: row - 2,
            tabindex: -1, role: "img", "aria-label": about(action), "data-tip": about(action) });
          if (p === 1) measured.set(action, box);
          const text = String(action.microbatch);
          const style = `fill: ${textOn(fill)}; font-size: ${size}px`;
          const fits = (widthOf(text) * size) / 12 + 2 <= room + 1e-6;
          if (fits) numbers.push(s("text", { class: "label", x: from + room / 2, y: top + row / 2, style }, text));
          return box;
        })));
      }
    });
    rows.find((group) => group.firstChild).firstChild.setAttribute("tabindex", 0);
    const label = "Planned and measured actions by rank; arrow keys go from one to another";
    return s("svg", { width, height: 2 * part + 20, role: "group", "aria-label": label, keydown: move, focusin: enter },
      axis(x, 0, longest, 2 * part), around, s("g", null, rows), numbers);
  };
  const reveal = (action) => {
    measured.get(action).scrollIntoView({ block: "center" });
    measured.get(action).focus();
  };
  const kinds = ["forward", "dgrad", "wgrad", "backward"].filter((kind) => actions.some((action) => action.kind === kind));
  const costs = Object.entries(plan.costs_ms).map(([kind, time]) => `${kind} ${ms(time)} ms`).join(", ");
  const slow = plan.slow.map((i) => actions[i]).map((action) => [
    h("button", { type: "button", click: () => reveal(action) }, of(action)), number(action.rank, whole),
    number(action.end_ms - action.start_ms), number(action.slow_ms)]);
  panel("Pipeline",
    h("p", null, `Schedule ${plan.schedule}: ${plural(ranks, "rank")}, ${plural(plan.microbatches, "microbatch", "es")}, ` +
      `${plural(chunks, "chunk")} a rank. Planned with ${costs}.`),
    actions.length ? legend(kinds, chunks > 1 && "lighter: later chunks", "number: microbatch") : null,
    actions.length ? chart(draw) : null,
    table("bubbles", "Bubble: share of the time that ranks are idle", ["", "step ms", "bubble"],
      runs.map(([name]) => [name, number(plan[name].step_ms), number(plan[name].bubble, percent)]), { sortable: false }),
    slow.length ? table("slow", "Slow actions: time above the median of their kind; choose one to see it",
      ["action", "rank", "ms", "above median ms"], slow, { sorted: 3 }) : null);
}

const unitOf = (bytes) => (bytes < 2 ** 27 ? ["MiB", 2 ** 20] : ["GiB", 2 ** 30]);
function memory({ memory: held }) {
  const pools = Object.entries(held?.pools ?? {});
  const sum = pools.reduce((total, [, value]) => total + value, 0);
  const peaks = ["predicted", "compiled", "measured"].map((name) => [`${name} peak`, held?.[`${name}_peak`]]);
  const rows = [...pools, ["sum of pools", pools.length ? sum : null], ...peaks].filter(([, value]) => value != null);
  if (!rows.length) return;
  const most = Math.max(...rows.map(([, value]) => value));
  const [unit, size] = unitOf(most);
  const bar = (value) => h("div", { class: "bar", style: `width: ${(100 * value) / (most || 1)}%` });
  panel("Memory", table("pools", "Of rank 0", ["pool", unit, "to scale"],
    rows.map(([name, value]) => [name, number(value, (bytes) => hundredths(bytes / size)), bar(value)]), { sortable: false }),
    held.usage && temporaries(held));
}

// Temporary buffers over the program, one area for each scope, and the largest buffers at the peak.
function temporaries({ usage: { allocations, scopes }, buffers }) {
  const known = Object.keys(COLOURS);
  const order = Object.keys(scopes).sort((a, b) => known.indexOf(a) - known.indexOf(b));
  const sums = allocations.map((_, i) => order.reduce((sum, scope) => sum + scopes[scope][i], 0));
  const most = Math.max(...sums);
  const peak = sums.indexOf(most);
  const [unit, size] = unitOf(most);
  const show = (bytes) => hundredths(bytes / size);
  const draw = (width) => {
    const [top, bottom] = [20, 200];
    const x = (i) => LEFT + ((width - LEFT - 24) * allocations[i]) / (allocations.at(-1) || 1);
    const y = (bytes) => bottom - ((bottom - top) * bytes) / (most || 1);
    let below = allocations.map(() => 0);
    const areas = order.map((scope) => {
      const above = below.map((bytes, i) => bytes + scopes[scope][i]);
      const edge = (values) => values.map((bytes, i) => `${x(i).toFixed(1)},${y(bytes).toFixed(1)}`);
      const points = [...edge(above), ...edge(below).reverse()].join(" ");
      below = above;
      const tip = `${scope}\n${show(scopes[scope][peak])} ${unit} at the peak, at most ${show(Math.max(...scopes[scope]))} ${unit}`;
      return s("polygon", { class: "segment", points, fill: colourOf(scope), "data-tip": tip });
    });
    const [text, isLeft] = [`peak ${show(most)} ${unit}`, x(peak) > width / 2];
    return s("svg", { width, height: bottom + 20, role: "img", "aria-label": `Temporary buffers over the program, ${text}` },
      ticks(0, most / size, 4).map(([value, label]) => [
        s("line", { class: "grid", x1: LEFT, x2: width - 24, y1: y(value * size), y2: y(value * size) }),
        s("text", { class: "muted", x: LEFT - 6, y: y(value * size), "text-anchor": "end", "dominant-baseline": "central" }, label)]),
      areas, s("line", { class: "end", x1: x(peak), x2: x(peak), y1: 4, y2: bottom }),
      s("text", { x: x(peak) + (isLeft ? -6 : 6), y: 14, "text-anchor": isLeft ? "end" : "start" }, text),
      s("text", { class: "muted", x: 0, y: 14 }, unit),
      s("text", { class: "muted", x: LEFT, y: bottom + 15 }, "allocations, in the order of the program"));
  };
  const rows = buffers.map((group) => [h("code", null, group.op), group.scope ? named(group.scope) : "", group.shape,
    number(group.count, whole), number(group.nbytes / 2 ** 20, tenths), number(group.count * group.nbytes, show)]);
  return [h("p", null, "Temporary buffers of the compiled step by the part that computes them, without state and batch:"),
    legend(order), chart(draw), rows.length ? table("buffers", "The largest of them at the peak",
      ["buffers", "category", "array", "count", "MiB each", `${unit} together`], rows, { sorted: 5 }) : null];
}

// A track as typed arrays in order of start. `reach` is what ends last of all so far: it never falls, so whatever overlaps, it
// can be searched for the first event that is not over at some time.
function ordered(track) {
  const order = track.start_ms.map((_, i) => i).sort((a, b) => track.start_ms[a] - track.start_ms[b]);
  const pick = (values) => Float64Array.from(order, (i) => values[i]);
  const [start, span] = [pick(track.start_ms), pick(track.ms)];
  const end = start.map((time, i) => time + span[i]);
  let last = -Infinity;
  const reach = end.map((time) => (last = Math.max(last, time)));
  const title = `rank ${track.rank} · ${track.stream}`;
  return { title, start, span, end, reach, name: pick(track.name), category: pick(track.category) };
}
function firstAfter({ reach }, time) {
  let [low, high] = [0, reach.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (reach[middle] > time) high = middle;
    else low = middle + 1;
  }
  return low;
}
function longestIn(row, from, to) {
  let best = -1;
  for (let i = firstAfter(row, from); i < row.start.length && row.start[i] < to; i++) {
    if (row.end[i] > from && (best < 0 || row.span[i] > row.span[best])) best = i;
  }
  return best;
}

function timeline({ timeline: recorded }) {
  const rows = (recorded?.tracks ?? []).filter((track) => track.start_ms.length).map(ordered);
  if (!rows.length) return;
  const { names, categories } = recorded;
  const [ROW, BAR, AXIS] = [22, 16, 22];
  const full = [Math.min(...rows.map((row) => row.start[0])), Math.max(...rows.map((row) => row.reach.at(-1)))];
  const left = Math.min(240, innerWidth / 4, Math.max(...rows.map((row) => widthOf(row.title))) + 10);
  const [colours, nameWidths] = [categories.map(colourOf), names.map(widthOf)];
  let [view, focused, width, pending, held] = [full, 0, 0, 0, null];
  const canvas = h("canvas", {
    tabindex: 0, role: "application", "aria-label": "Timeline of kernels", "aria-describedby": "timeline-help" });
  const range = h("span", { class: "muted", id: "timeline-range" });
  const perMs = () => (width - left) / (view[1] - view[0]);
  const x = (time) => left + (time - view[0]) * perMs();

  const drawRow = (pen, row, top) => {
    // Events of less than a pixel share one: the longest gives the colour, all together how strong it is.
    let [column, best, covered] = [-1, -1, 0];
    const flush = () => {
      if (best < 0) return;
      pen.globalAlpha = Math.min(1, Math.max(0.35, covered));
      pen.fillStyle = colours[row.category[best]];
      pen.fillRect(column, top, 1, BAR);
      pen.globalAlpha = 1;
      best = -1;
    };
    for (let i = firstAfter(row, view[0]); i < row.start.length && row.start[i] < view[1]; i++) {
      const [from, to] = [Math.max(x(row.start[i]), left), Math.min(x(row.end[i]), width)];
      if (to <= from) continue;
      if (to - from < 1) {
        if (Math.floor(from) !== column) flush();
        if (best < 0) [column, covered] = [Math.floor(from), 0];
        if (best < 0 || row.span[i] > row.span[best]) best = i;
        covered += to - from;
        continue;
      }
      flush();
      const [colour, name] = [colours[row.category[i]], row.name[i]];
      pen.fillStyle = colour;
      // A gap between neighbours that are wide enough to spare it.
      pen.fillRect(from, top, to - from > 3 ? to - from - 1 : to - from, BAR);
      if (nameWidths[name] + 8 > to - from) continue;
      pen.fillStyle = textOn(colour);
      pen.fillText(names[name], (from + to - nameWidths[name]) / 2, top + BAR / 2);
    }
    flush();
  };
  const draw = () => {
    width = canvas.parentElement.clientWidth;
    const [height, ratio] = [rows.length * ROW + AXIS, devicePixelRatio];
    [canvas.width, canvas.height] = [Math.round(width * ratio), Math.round(height * ratio)];
    canvas.style.cssText = `width: ${width}px; height: ${height}px`;
    const [ink, muted, line] = ["--ink", "--muted", "--line"].map(css);
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    Object.assign(pen, { font: FONT, textBaseline: "middle", strokeStyle: ink, lineWidth: 2 });
    for (const [time, text] of ticks(view[0], view[1], (width - left) / 90)) {
      pen.fillStyle = line;
      pen.fillRect(x(time), 0, 1, height - AXIS);
      pen.fillStyle = muted;
      pen.fillText(text, Math.max(left, Math.min(x(time) - widthOf(text) / 2, width - widthOf(text))), height - AXIS / 2);
    }
    pen.fillText("ms", 0, height - AXIS / 2);
    rows.forEach((row, r) => {
      pen.fillStyle = ink;
      pen.fillText(row.title, 0, (r + 0.5) * ROW, left - 10);
      drawRow(pen, row, r * ROW + 3);
    });
    if (document.activeElement !== canvas) return;
    pen.strokeRect((left + width) / 2 - 1, focused * ROW + 1, 2, ROW - 2);
  };

  const show = (from, to) => {
    const length = Math.min(Math.max(to - from, 1e-5), full[1] - full[0]);
    const start = Math.min(Math.max((from + to - length) / 2, full[0]), full[1] - length);
    view = [start, start + length];
    range.textContent = `${ms(view[0])} to ${ms(view[1])} of ${ms(full[1])} ms`;
    pending ||= requestAnimationFrame(() => ((pending = 0), draw()));
  };
  const pan = (share) => show(...view.map((time) => time + share * (view[1] - view[0])));
  const middle = () => (view[0] + view[1]) / 2;
  const zoom = (factor, at = middle()) => show(...view.map((time) => at + (time - at) / factor));
  const time = (value) => (value < 1 ? `${brief(1000 * value)} µs` : `${ms(value)} ms`);
  const describe = (r, i) => `${names[rows[r].name[i]]}\n${categories[rows[r].category[i]]}, ${rows[r].title}\n` +
    `starts at ${ms(rows[r].start[i])} ms, takes ${time(rows[r].span[i])}`;
  // Keys look at what is in the middle of one row.
  const jump = (way) => {
    const { start, end, span } = rows[focused];
    const i = way > 0 ? start.findIndex((time) => time > middle()) : end.findLastIndex((time) => time < middle());
    if (i >= 0) show(start[i] - 2 * span[i], end[i] + 2 * span[i]);
  };
  const change = (by) => {
    focused = Math.max(0, Math.min(focused + by, rows.length - 1));
    show(...view);
  };
  const lookAtMiddle = () => {
    const box = canvas.getBoundingClientRect();
    const i = longestIn(rows[focused], middle() - 1 / perMs(), middle() + 1 / perMs());
    const text = i < 0 ? "nothing runs here" : describe(focused, i);
    showTip(text, box.left + (left + width) / 2, box.top + (focused + 1) * ROW - 12);
  };
  const keys = {
    "+": () => zoom(1.5), "=": () => zoom(1.5), "-": () => zoom(1 / 1.5), Home: () => show(...full),
    ArrowLeft: () => pan(-0.1), ArrowRight: () => pan(0.1), ArrowUp: () => change(-1), ArrowDown: () => change(1),
    Enter: (event) => jump(event.shiftKey ? -1 : 1),
  };
  canvas.addEventListener("keydown", (event) => {
    if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key](event);
    lookAtMiddle();
  });
  for (const name of ["focus", "blur"]) canvas.addEventListener(name, () => show(...view));
  canvas.addEventListener("wheel", (event) => {
    const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
    if (!event.ctrlKey && Math.abs(sideways) <= (event.shiftKey ? 0 : Math.abs(event.deltaY))) return;
    event.preventDefault();
    if (event.ctrlKey) zoom(Math.exp(-event.deltaY / 200), view[0] + (Math.max(event.offsetX, left) - left) / perMs());
    else pan(sideways / (width - left));
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    held = event.clientX;
    canvas.setPointerCapture(event.pointerId);
  });
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => (held = null));
  canvas.addEventListener("pointermove", (event) => {
    if (held !== null) {
      pan((held - event.clientX) / (width - left));
      held = event.clientX;
      return;
    }
    const [r, pixel] = [Math.floor(event.offsetY / ROW), 1 / perMs()];
    const at = view[0] + (event.offsetX - left) * pixel;
    const i = r in rows && event.offsetX >= left ? longestIn(rows[r], at - pixel, at + pixel) : -1;
    showTip(i >= 0 ? describe(r, i) : event.offsetX < left ? rows[r]?.title : "", event.clientX, event.clientY);
  });
  const tool = (text, click) => h("button", { type: "button", click }, text);
  panel("Timeline",
    h("p", { id: "timeline-help", class: "muted" },
      "Drag to move; Ctrl and the wheel to zoom. With the focus on it: ← and → move, ↑ and ↓ choose a row, " +
      "+ and − zoom, Enter goes to its next kernel (with Shift: the one before), Home shows all."),
    h("div", { class: "tools" }, tool("Zoom in", () => zoom(2)), tool("Zoom out", () => zoom(0.5)),
      tool("Left", () => pan(-0.25)), tool("Right", () => pan(0.25)), tool("Whole step", () => show(...full)), range),
    legend(categories.filter((_, c) => rows.some((row) => row.category.includes(c)))), h("div", null, canvas));
  show(...full);
  charts.push(draw);
}

build([summary, whereTheTimeWent, whatToFixFirst, whereInTheCode, collectives, graphs, pipeline, memory, timeline]);
