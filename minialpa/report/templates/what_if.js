"use strict";
// The radio buttons, links to cases and the address choose a case. Views that contain it are shown.
{
  const pick = document.getElementById("pick") ?? document.createElement("form"); // absent for a single case
  const one = document.getElementById("one");
  const table = document.getElementById("cases");
  const rows = new Map([...table.tBodies[0].rows].map((row) => [row.dataset.key, row]));
  const titles = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  let key = [...rows.keys()].find((each) => all("input:checked", pick).every((box) => each.split("-")[box.name] === box.value));

  const fill = (row) => {
    const cells = Object.fromEntries(titles.map((title, i) => [title, row.cells[i].textContent]));
    const fits = "bars" in row.dataset;
    document.getElementById("one-name").textContent = `${cells.model} on ${cells.GPUs}:`;
    document.getElementById("one-fit").textContent = fits ? cells.plan + "." : cells.plan;
    document.getElementById("one-tiles").replaceChildren(...titles.slice(titles.indexOf("step"), -1).filter((title) => fits && cells[title]).map((title) => {
      const tile = document.createElement("div");
      tile.className = "tile";
      tile.append(Object.assign(document.createElement("dt"), { textContent: title }));
      tile.append(Object.assign(document.createElement("dd"), { textContent: cells[title] }));
      return tile;
    }));
    one.querySelector(".bars").hidden = !fits;
    const parts = fits ? row.dataset.bars.split(" ") : [];
    const names = all(".bars .legend b", one);
    all(".bars .bar > span", one).forEach((bar, i) => {
      bar.style.width = `${parts[i] ?? 0}%`;
      bar.hidden = names[i].parentElement.hidden = !(parts[i] > 0);
      const isPart = bar.parentElement === one.querySelector(".bar");
      names[i].textContent = isPart ? `${parts[i]} %` : `${+(parts[i] * row.dataset.gb / 100).toPrecision(3)} GB`;
    });
  };

  const show = (next) => {
    key = next;
    const options = key.split("-");
    for (const box of all("input", pick)) box.checked = options[box.name] === box.value;
    for (const part of all("[data-show]")) part.hidden = !part.dataset.show.split("-").every((option, i) => option === "*" || option === options[i]);
    for (const link of all("[data-key]")) link.toggleAttribute("aria-current", link.dataset.key === key);
    fill(rows.get(key));
  };

  pick.addEventListener("change", (event) => {
    const options = key.split("-");
    options[event.target.name] = event.target.value;
    const wanted = options.join("-");
    // A grid need not have all combinations: the nearest case with the new option.
    const near = [...rows.keys()].filter((each) => each.split("-")[event.target.name] === event.target.value);
    const distance = (each) => each.split("-").filter((option, i) => option !== options[i]).length;
    show(rows.has(wanted) ? wanted : near.sort((a, b) => distance(a) - distance(b))[0]);
    history.replaceState(null, "", `#${rows.get(key).id}`);
  });
  for (const link of all("a[data-key]")) link.addEventListener("click", (event) => {
    event.preventDefault();
    show(link.dataset.key);
    history.replaceState(null, "", link.hash);
  });
  const open = () => {
    const row = document.getElementById(location.hash.slice(1));
    if (row?.dataset.key) show(row.dataset.key);
  };
  addEventListener("hashchange", open);
  one.hidden = false;
  show(key);
  open();
}
