// On a telephone, tables that can be opened are closed at first.
if (matchMedia("(max-width: 42rem)").matches) {
  for (const details of document.querySelectorAll("details.table")) details.open = false;
}
// A click on a heading sorts a table. A filter shows only the rows that contain all typed words.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const headings = [...table.tHead.rows[0].cells];
  const key = (row, place) => {
    const cell = row.cells[place];
    return cell.dataset.value === undefined ? cell.textContent.trim() : Number(cell.dataset.value);
  };
  const compare = (one, other) => {
    // Empty cells come last in both directions.
    if (one === "" || other === "") return 0;
    if (typeof one === "number" && typeof other === "number") return one - other;
    return String(one).localeCompare(String(other), undefined, {numeric: true});
  };
  headings.forEach((heading, place) => {
    if (!heading.textContent.trim()) return;
    const button = heading.querySelector("button");
    button.onclick = () => {
      // The first click on a column of figures puts the largest figure first.
      const first = heading.classList.contains("text") ? "ascending" : "descending";
      const second = first === "ascending" ? "descending" : "ascending";
      const order = heading.getAttribute("aria-sort") === first ? second : first;
      for (const other of headings) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", order);
      const sign = order === "ascending" ? 1 : -1;
      const sorted = [...rows].sort((one, other) => {
        const [a, b] = [key(one, place), key(other, place)];
        if ((a === "") !== (b === "")) return a === "" ? 1 : -1;
        return sign * compare(a, b);
      });
      body.classList.add("sorted");
      body.append(...sorted);
    };
  });
  const filter = table.closest("section").querySelector("input[type=search]");
  if (!filter) continue;
  const number = filter.parentElement.querySelector("output");
  filter.oninput = () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      row.hidden = !words.every(word => row.textContent.toLowerCase().includes(word));
      shown += !row.hidden;
    }
    body.classList.toggle("filtered", words.length > 0);
    number.textContent = words.length ? `${shown} of ${rows.length}` : "";
  };
}
