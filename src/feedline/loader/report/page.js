// A tap on a block shows its title, as a pointer does.
document.querySelectorAll("svg.time").forEach((svg) => {
  const note = document.createElement("p");
  note.textContent = "Tap a block for its batch and duration.";
  svg.parentElement.after(note);
  svg.addEventListener("click", (event) => {
    const title = event.target.querySelector && event.target.querySelector("title");
    if (title) note.textContent = title.textContent;
  });
});

// Sliders choose among the settings that were predicted when the page was written.
const ranks = JSON.parse(document.getElementById("figures").textContent);
const shown = ranks.filter((figures) => (figures.what_if || []).length);
document.querySelectorAll("form.what-if").forEach((form, place) => {
  const figures = shown[place];
  const cells = figures.what_if;
  const rate = figures.wall_s ? figures.samples / figures.wall_s : 0;
  const values = (name) => [...new Set(cells.map((cell) => cell[name]))].sort((a, b) => a - b);
  const now = cells.find((cell) => cell.is_now) || cells[0];
  const sliders = ["num_workers", "prefetch_factor"].map((name) => {
    const input = form.elements[name];
    const steps = values(name);
    input.max = steps.length - 1;
    input.value = steps.indexOf(now[name]);
    return { name, input, steps, label: input.parentElement.querySelector("b") };
  });
  form.elements.in_order.checked = now.in_order;
  const predict = () => {
    const wanted = { in_order: form.elements.in_order.checked };
    sliders.forEach((slider) => {
      wanted[slider.name] = slider.steps[slider.input.value];
      slider.label.textContent = wanted[slider.name];
    });
    const alone = wanted.num_workers === 0;  // without workers nothing is prefetched
    form.elements.prefetch_factor.disabled = form.elements.in_order.disabled = alone;
    const cell = cells.find((each) => each.num_workers === wanted.num_workers &&
      (alone || (each.prefetch_factor === wanted.prefetch_factor && each.in_order === wanted.in_order)));
    const samples = cell && Math.round(rate * cell.gain).toLocaleString("en");
    form.querySelector("output").textContent = !cell ? "not known to the model"
      : `${samples} samples/s` + (cell.is_now ? ", as now" : `, ${cell.gain.toFixed(2)} × today`);
  };
  form.addEventListener("input", predict);
  form.hidden = false;
  predict();
});
