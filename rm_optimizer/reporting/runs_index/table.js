const rows = [...document.querySelectorAll("#runs tbody tr")];
const filter = document.getElementById("filter");
const count = document.getElementById("count");
const number = new Intl.NumberFormat("en");
const texts = rows.map((row) => row.textContent.toLowerCase());

function choose() {
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  rows.forEach((row, at) => {
    row.hidden = !words.every((word) => texts[at].includes(word));
    shown += !row.hidden;
  });
  count.textContent = `${number.format(shown)} of ${number.format(rows.length)}`;
  history.replaceState(null, "", filter.value ? `#${encodeURIComponent(filter.value)}` : "#");
}

function keyOf(row, column) {
  const cell = row.cells[column];
  return cell.dataset.sort === undefined ? cell.textContent : Number(cell.dataset.sort);
}

function order(first, second, sign) {
  const empty = (first === "") - (second === "");
  if (empty) return empty;
  if (typeof first === "number" && typeof second === "number") return sign * (first - second);
  return sign * String(first).localeCompare(String(second), "en", { numeric: true });
}

document.querySelectorAll("#runs thead th").forEach((head, column) => {
  head.querySelector("button").addEventListener("click", () => {
    const ascending = head.getAttribute("aria-sort") !== "ascending";
    document.querySelectorAll("#runs thead th").forEach((each) => each.setAttribute("aria-sort", "none"));
    head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
    const keyed = rows.map((row) => [keyOf(row, column), row]);
    keyed.sort((one, other) => order(one[0], other[0], ascending ? 1 : -1));
    document.querySelector("#runs tbody").append(...keyed.map(([, row]) => row));
  });
});

filter.addEventListener("input", choose);
filter.value = decodeURIComponent(location.hash.slice(1));
choose();
