"use strict";
// Long tables: a button shows the rows after the first ones.
for (const table of document.querySelectorAll("table[data-most]")) {
  const rows = table.querySelectorAll("tbody > tr");
  if (rows.length < Number(table.dataset.most) + 4) continue;
  [...rows].slice(table.dataset.most).forEach((row) => row.classList.add("later"));
  const button = document.createElement("button");
  const show = (all) => {
    table.classList.toggle("short", !all);
    button.textContent = all ? "Show fewer rows" : `Show all ${rows.length} rows`;
    button.setAttribute("aria-expanded", all);
  };
  button.type = "button";
  button.addEventListener("click", () => show(table.classList.contains("short")));
  table.parentElement.after(button);
  show(false);
}

// Filter: rows that contain all words of the box stay.
for (const box of document.querySelectorAll("[data-filter]")) {
  const table = document.getElementById(box.dataset.filter);
  const rows = [...table.querySelectorAll("tbody > tr")];
  const texts = rows.map((row) => row.textContent.toLowerCase());
  const count = document.getElementById(`${box.id}-count`);
  box.addEventListener("input", () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    rows.forEach((row, i) => { row.hidden = !words.every((word) => texts[i].includes(word)); });
    table.classList.toggle("filtered", words.length > 0);
    count.textContent = words.length ? `${rows.filter((row) => !row.hidden).length} of ${rows.length}` : "";
  });
  box.closest(".filter").hidden = false;
}

// Zoom: a wider picture in a container that scrolls. The time in the middle, or under the pointer, stays.
for (const controls of document.querySelectorAll(".controls")) {
  const view = document.getElementById(controls.dataset.view);
  const picture = view.querySelector("svg");
  const level = controls.querySelector("output");
  let zoom = 1;
  const set = (value, x = view.clientWidth / 2) => {
    const next = Math.min(200, Math.max(1, value));
    const at = (view.scrollLeft + x) / picture.getBoundingClientRect().width;
    picture.style.width = `${100 * next}%`;
    picture.style.minWidth = next > 1 ? `${34 * next}rem` : "";
    view.scrollLeft = at * picture.getBoundingClientRect().width - x;
    zoom = next;
    view.classList.toggle("near", zoom > 3);
    level.textContent = zoom > 1 ? `${Math.round(100 * zoom)} %` : "";
  };
  const move = (part) => view.scrollBy({ left: part * view.clientWidth });
  const actions = {
    in: () => set(zoom * 1.5), out: () => set(zoom / 1.5), left: () => move(-0.4), right: () => move(0.4), all: () => set(1),
  };
  const keys = { "+": "in", "=": "in", "-": "out", "0": "all", ArrowLeft: "left", ArrowRight: "right" };
  controls.addEventListener("click", (event) => actions[event.target.dataset.action]?.());
  view.addEventListener("keydown", (event) => {
    if (!(event.key in keys) || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    actions[keys[event.key]]();
  });
  view.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    set(zoom * Math.exp(-event.deltaY / 300), event.clientX - view.getBoundingClientRect().left);
  }, { passive: false });
  controls.hidden = false;
}
