// Compares runs side by side. Reads the data of jgraph/report/runs.py and uses the shared functions of jgraph/page.html.

const GIB = 2 ** 30;
const CURVES = {
  loss: { title: "Loss, nats a token", canBeLog: true, isNoisy: true },
  eval_loss: { title: "Held-out loss, nats a token", canBeLog: true },
  learning_rate: { title: "Learning rate" },
  grad_norm: { title: "Gradient norm", canBeLog: true, isNoisy: true },
  tokens_per_second: { title: "Tokens a second", isFromZero: true, isNoisy: true },
  peak_memory_bytes: { title: "Peak memory, GiB", unit: GIB, isFromZero: true },
};
const PER = {
  steps: (run, points) => points.step,
  tokens: (run, points) => points.step.map((step) => (run.tokens_per_step == null ? null : step * run.tokens_per_step)),
  seconds: (run, points) => points.seconds,
};
// The reader's choices.
const chosen = { per: "steps", smoothing: 0, isLog: false, hidden: new Set() };

const colourOf = (r) => `var(--run-${r % 8})`;
// From the ninth run on, colors repeat with dashes.
const dashesOf = (r) => [null, "6 3", "2 3"][Math.floor(r / 8) % 3];
const named = (run, r) => {
  const line = s("line", { x1: 0, x2: 26, y1: 5, y2: 5, "stroke-width": 3, "stroke-dasharray": dashesOf(r), style: `stroke: ${colourOf(r)}` });
  return h("span", { class: "run" }, s("svg", { class: "line", "aria-hidden": "true" }, line), run.name);
};
const lastOf = (values) => values?.findLast((value) => value != null);
const leastOf = (values) => values?.reduce((least, value) => (value != null && !(value >= least) ? value : least), undefined);
const four = fixed(4);
const exact = atMost(1);
const told = new Intl.NumberFormat("en", { maximumSignificantDigits: 5 }).format;

function runs({ runs }) {
  const rows = runs.map((run, r) => {
    const of = (curve, pick) => pick(run.curves[curve]?.value);
    const memory = of("peak_memory_bytes", lastOf);
    return [named(run, r), run.state, number(run.done, whole), number(run.steps, whole), number(of("loss", lastOf), four),
      number(of("eval_loss", lastOf), four), number(of("eval_loss", leastOf), four), number(run.tokens_per_second, whole),
      number(lastOf(run.curves.loss?.seconds), tenths), number(memory == null ? null : memory / GIB, hundredths),
      run.config["versions.device"] ?? "–"];
  });
  const columns = ["run", "state", "steps done", "of", "loss", "held-out loss", "least held-out", "tokens/s", "seconds", "GiB", "device"];
  const caption = "Losses in nats a token, of the last entry; tokens a second: the median; seconds: in steps alone";
  panel("Runs", h("div", { class: "wide" }, table("runs-table", caption, columns, rows)));
}

// Returns the exponential moving average of a curve, with bias correction. Missing values stay missing. A thinned curve is
// averaged over the means of its stretches, because its values are their extremes.
function smoothed(values, means, weight) {
  let [sum, total] = [0, 0];
  return values.map((own, i) => {
    if (own == null) return null;
    const value = means ? means[i] : own;
    [sum, total] = [weight * sum + (1 - weight) * value, weight * total + (1 - weight)];
    return sum / total;
  });
}

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 }).format;
const shortUpTo = (most) => (most >= 1e5 ? compact : brief);
const linearTicks = (from, to, count) => ticks(from, to, count).map(([value]) => value);
const logTicks = (from, to) => {
  const found = [];
  for (let power = Math.floor(Math.log10(from)); power <= Math.log10(to); power++) {
    for (const factor of [1, 2, 5]) found.push(factor * 10 ** power);
  }
  const shown = found.filter((value) => value >= from && value <= to);
  return shown.length > 2 ? shown : linearTicks(from, to, 5);
};

function curve(name, runs) {
  const { title, unit = 1, canBeLog, isFromZero, isNoisy } = CURVES[name];
  const [HEIGHT, LEFT, RIGHT, TOP] = [210, 56, 18, 8];
  let [seen, xs, at, place] = [[], [], null, () => {}];

  const look = () => {
    seen = runs.flatMap((run, r) => {
      const points = run.curves[name];
      if (!points || chosen.hidden.has(r)) return [];
      const x = PER[chosen.per](run, points);
      const isShown = (value) => value != null && !(chosen.isLog && canBeLog && value <= 0);
      const raw = points.value.map((value, i) => (isShown(value) && x[i] != null ? value / unit : null));
      const means = points.mean?.map((value) => value / unit);
      const y = chosen.smoothing && isNoisy ? smoothed(raw, means, chosen.smoothing) : raw;
      return raw.some((value) => value != null) ? [{ run, r, x, raw, y }] : [];
    });
    xs = [...new Set(seen.flatMap(({ x, raw }) => x.filter((_, i) => raw[i] != null)))].sort((a, b) => a - b);
  };
  const nearest = ({ x, raw }, to) => {
    let best = -1;
    for (let i = 0; i < x.length; i++) {
      if (raw[i] != null && (best < 0 || Math.abs(x[i] - to) < Math.abs(x[best] - to))) best = i;
    }
    return best;
  };

  const draw = (width) => {
    look();
    at = null;
    if (!seen.length) return h("p", { class: "muted" }, "nothing to show");
    const isLog = chosen.isLog && canBeLog;
    const values = seen.flatMap(({ raw }) => raw.filter((value) => value != null));
    const bounds = (of) => of.reduce(([least, most], value) => [Math.min(least, value), Math.max(most, value)], [Infinity, -Infinity]);
    let [low, high] = bounds(values);
    const room = isLog ? 1.05 : (high - low || Math.abs(high) || 1) * 0.05;
    [low, high] = isLog ? [low / room, high * room] : [isFromZero ? 0 : low >= 0 ? Math.max(0, low - room) : low - room, high + room];
    const scale = isLog ? Math.log : Number;
    const longest = Math.max(xs.at(-1), 1e-9);
    const bottom = HEIGHT - 22;
    const [xText, yText] = [shortUpTo(longest), shortUpTo(high)];
    const areFew = seen.every(({ y }) => y.length < 30);
    const toX = (value) => LEFT + ((width - LEFT - RIGHT) * value) / longest;
    const toY = (value) => bottom - ((bottom - TOP) * (scale(value) - scale(low))) / (scale(high) - scale(low));
    const path = (x, y) => {
      let pen = "M";
      return y.map((value, i) => {
        const way = value == null ? "" : `${pen}${toX(x[i]).toFixed(1)} ${toY(value).toFixed(1)}`;
        pen = value == null ? "M" : "L";
        return way;
      }).join("");
    };
    const dot = (r, x, y, radius) => s("circle", { class: "point", cx: toX(x), cy: toY(y), r: radius, style: `fill: ${colourOf(r)}` });
    const lines = seen.map(({ r, x, raw, y }) => {
      const style = `stroke: ${colourOf(r)}`;
      // A point without neighbours has no line.
      const alone = y.flatMap((value, i) => (value != null && (areFew || (y[i - 1] ?? y[i + 1]) == null) ? [dot(r, x[i], value, 3)] : []));
      return s("g", { "data-run": r }, y === raw ? null : s("path", { class: "curve raw", d: path(x, raw), style }),
        s("path", { class: "curve", d: path(x, y), style, "stroke-dasharray": dashesOf(r) }), alone);
    });
    const cursor = s("g");
    const grid = [...(isLog ? logTicks : linearTicks)(low, high, 5).flatMap((value) => [
      s("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: toY(value), y2: toY(value) }),
      s("text", { class: "muted", x: LEFT - 6, y: toY(value) + 4, "text-anchor": "end" }, yText(value))]),
      ...linearTicks(0, longest, (width - LEFT) / 80).map((value) =>
        s("text", { class: "muted", x: toX(value), y: HEIGHT - 6, "text-anchor": "middle" }, xText(value)))];
    const label = `${title} by ${chosen.per}: ${seen.map(({ run, y }) => `${run.name} ${told(lastOf(y))}`).join(", ")}`;
    const chart = s("svg", { width, height: HEIGHT, tabindex: 0, role: "application", "aria-label": label, "aria-describedby": "curves-help" },
      grid, lines, cursor);
    place = (value, where) => {
      at = value;
      if (at == null) return cursor.replaceChildren();
      const entries = seen.map((one) => [one, nearest(one, at)]);
      cursor.replaceChildren(s("line", { class: "at", x1: toX(at), x2: toX(at), y1: TOP, y2: bottom }),
        ...entries.map(([{ r, x, y }, i]) => dot(r, x[i], y[i], 4)));
      const box = chart.getBoundingClientRect();
      const text = entries.map(([{ run, x, y }, i]) => `${run.name}: ${told(y[i])}${x[i] === at ? "" : ` at ${exact(x[i])}`}`);
      const [left, top] = where ?? [box.left + toX(at), box.top + TOP];
      const head = chosen.per === "steps" ? `step ${exact(at)}` : `${exact(at)} ${chosen.per}`;
      showTip(`${head}\n${text.join("\n")}`, left, top);
    };
    const keys = {
      ArrowRight: () => xs.find((x) => at == null || x > at) ?? at, ArrowLeft: () => xs.findLast((x) => at == null || x < at) ?? at,
      Home: () => xs[0], End: () => xs.at(-1), Escape: () => null,
    };
    chart.addEventListener("keydown", (event) => {
      if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      place(keys[event.key]());
    });
    chart.addEventListener("pointermove", (event) => {
      event.stopPropagation();
      const to = ((event.clientX - chart.getBoundingClientRect().left - LEFT) * longest) / (width - LEFT - RIGHT);
      const i = nearest({ x: xs, raw: xs }, to);
      place(xs[i], [event.clientX, event.clientY]);
    });
    for (const name of ["pointerleave", "blur"]) chart.addEventListener(name, () => (place(null), showTip("")));
    return chart;
  };
  return h("figure", { "data-curve": name }, h("figcaption", null, title), chart(draw));
}

function curves({ runs }) {
  const there = Object.keys(CURVES).filter((name) => runs.some((run) => run.curves[name]));
  if (!there.length) return;
  const choose = (change) => (event) => {
    change(event.target);
    showTip("");
    redraw();
  };
  const per = h("fieldset", null, h("legend", null, "Over"), Object.keys(PER).map((name) => h("label", null,
    h("input", { type: "radio", name: "per", value: name, checked: name === chosen.per ? "" : null, change: choose(() => (chosen.per = name)) }), name)));
  const smoothing = h("label", null, "Smoothing", h("input", { type: "range", id: "smoothing", min: 0, max: 0.99, step: 0.01, value: 0,
    input: choose((slider) => (chosen.smoothing = Number(slider.value))) }));
  const log = h("label", null, h("input", { type: "checkbox", id: "log", change: choose((box) => (chosen.isLog = box.checked)) }),
    "Logarithmic losses and norms");
  const shown = (r) => choose((box) => chosen.hidden[box.checked ? "delete" : "add"](r));
  const names = runs.map((run, r) => h("li", null, runs.length > 1
    ? h("label", null, h("input", { type: "checkbox", class: "shown", checked: "", change: shown(r) }), named(run, r)) : named(run, r)));
  panel("Curves", h("p", { id: "curves-help", class: "muted" }, "Values are told under the pointer. With the focus on a chart: " +
    "← and → go from entry to entry, Home and End to the first and the last. Seconds are those of steps alone."),
    h("div", { class: "tools" }, per, smoothing, log), h("ul", { class: "legend" }, names),
    h("div", { class: "charts" }, there.map((name) => curve(name, runs))));
}

function samples({ runs }) {
  const there = runs.flatMap((run, r) => run.samples.toReversed().map((sample) => [run, r, sample]));
  if (!there.length) return;
  panel("Samples", h("div", { id: "samples-of" }, there.map(([run, r, { step, prompt, text }]) => h("div", null,
    h("h3", null, named(run, r), ` after ${plural(step, "step")}`),
    h("pre", null, h("span", { class: "muted", "data-tip": "the prompt, from held-out text" }, prompt), text)))));
}

function configuration({ runs }) {
  const fields = [...new Set(runs.flatMap((run) => Object.keys(run.config)))];
  const differs = (field) => runs.some((run) => run.config[field] !== runs[0].config[field]);
  const rows = fields.map((field) => [h("code", null, field), ...runs.map((run) => run.config[field] ?? "–")]);
  if (!rows.length) return;
  const caption = "Fields of config.json, with what the text and the versions were";
  const result = table("configuration-table", caption, ["", ...runs.map((run) => run.name)], rows, { sortable: false });
  const count = fields.filter(differs).length;
  fields.forEach((field, i) => result.tBodies[0].rows[i].classList.toggle("same", !differs(field)));
  if (runs.length === 1) result.classList.add("all");
  const toggle = () => button.replaceChildren(result.classList.toggle("all") ? `Show the ${count} that differ` : `Show all ${fields.length}`);
  const button = h("button", { type: "button", click: toggle }, `Show all ${fields.length}`);
  panel(runs.length > 1 ? "What differs" : "Configuration",
    runs.length > 1 && !count ? h("p", null, "Nothing but the directory.") : null,
    h("div", { class: "wide" }, result), runs.length > 1 ? h("p", null, button) : null);
}

build([runs, curves, samples, configuration]);
