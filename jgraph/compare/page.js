// The data are `rows` of both programs, `rounds` with their times and the ratio, and `captures` of programs on a GPU.

function programs({ names, rows }) {
  panel("Programs", table("programs-table", "Medians over rounds, with the smallest and the largest", ["", ...names], rows, { sortable: false }));
}

function rounds({ names, rounds }) {
  const columns = ["round", ...names.map((name) => `${name}, ms`), ...names.map((name) => `${name}, host ms`), names.join(" / ")];
  const cells = rounds.map((times, i) => [whole(i + 1), ...times.map((time) => number(time))]);
  panel("Rounds", table("rounds-table", "Each program has one turn per round, and the order alternates", columns, cells, { sortable: false }));
}

function captures({ captures }) {
  for (const [name, text] of captures) panel(`Capture of ${name}`, h("pre", null, text));
}

build([programs, rounds, captures]);
